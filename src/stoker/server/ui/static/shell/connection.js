/**
 * The stream of events: kept open, read piece by piece, begun again where it ends.
 *
 * A piece is read when the one before is worked off: what waits, waits in the server, which drops what a slow reader
 * misses and sends a snapshot. Work is done in slices, so that the page answers keys and clicks meanwhile.
 */

import { ApiError, ask } from "./api.js";
import { SseParser } from "./sse.js";

const SLICE_MS = 6;
const DOCUMENTS_AT_ONCE = 32;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
const QUIET_MS = 20_000; // the server says something at least every ten seconds

/** Let the browser draw and take input. */
const breath = () => {
	if (globalThis.scheduler?.yield) return globalThis.scheduler.yield();
	return new Promise((resume) => setTimeout(resume));
};

/**
 * Read events for as long as the page lives.
 *
 * take(documents): some documents in order, at most DOCUMENTS_AT_ONCE.
 * tell({state, error, retryAt}): state is connecting, live, waiting (retryAt: performance.now() then) or refused.
 */
export function connection({ path, take, tell, heard }) {
	let last = "";
	let current = null;
	let wake = () => {};

	async function read(signal) {
		const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
		const answer = await ask("GET", path, { headers, signal });
		tell({ state: "live" });
		const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
		const parser = new SseParser();
		let until = performance.now() + SLICE_MS;
		try {
			for (;;) {
				const watch = setTimeout(() => current.abort(new Error("silent")), QUIET_MS);
				const { value, done } = await reader.read().finally(() => clearTimeout(watch));
				if (done) return;
				heard();
				const events = parser.push(value).filter((one) => one.data !== "[DONE]");
				for (let from = 0; from < events.length; from += DOCUMENTS_AT_ONCE) {
					const some = events.slice(from, from + DOCUMENTS_AT_ONCE);
					take(documents_of(some));
					last = some.findLast((one) => one.id)?.id ?? last;
					if (performance.now() < until) continue;
					await breath();
					until = performance.now() + SLICE_MS;
					if (signal.aborted) return; // what follows is of a former key
				}
			}
		} finally {
			reader.cancel().catch(() => {});
		}
	}

	async function run() {
		let pause = FIRST_PAUSE_MS;
		for (;;) {
			current = new AbortController();
			const began = performance.now();
			let error = null;
			tell({ state: "connecting" });
			try {
				await read(current.signal);
			} catch (caught) {
				error = caught;
			}
			if (error instanceof ApiError && [401, 403, 404].includes(error.status)) {
				tell({ state: "refused", error });
				await new Promise((resume) => (wake = resume));
				pause = FIRST_PAUSE_MS;
				continue;
			}
			if (performance.now() - began > LONGEST_PAUSE_MS) pause = FIRST_PAUSE_MS;
			const wait = pause * (0.75 + Math.random() / 2);
			tell({ state: "waiting", error, retryAt: performance.now() + wait });
			await new Promise((resume) => setTimeout((wake = resume), wait));
			pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
		}
	}

	run();
	return {
		/** Begin again now: with another key, or as the network is back. */
		again({ afresh = false } = {}) {
			if (afresh) last = "";
			current?.abort(new Error("again"));
			wake();
		},
		/** Try now if it waits for its next try. */
		hurry: () => wake(),
	};
}

function documents_of(events) {
	const found = [];
	for (const one of events) {
		try {
			found.push(JSON.parse(one.data));
		} catch {
			// a document of another version's shape is no reason to lose the rest
		}
	}
	return found;
}
