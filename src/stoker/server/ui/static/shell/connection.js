/**
 * The stream of events: kept open, read piece by piece, begun again where it ends.
 *
 * What waits is bounded: past MAX_WAITING_CHARS nothing is read until it is worked off, and the server drops what a slow
 * reader misses and sends a snapshot. Work is done in slices, so that the page answers keys and clicks meanwhile.
 */

import { ApiError, ask } from "./api.js";
import { SseParser } from "./sse.js";

export const SLICE_MS = 6;
export const DOCUMENTS_AT_ONCE = 32;
export const MAX_WAITING_CHARS = 2 ** 20;
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
 * tell({state, error, retryAt}): state is connecting, live, waiting (retryAt: performance.now() then), refused or ended.
 * heard(): bytes came.
 */
export function connection({ path, take, tell, heard }) {
	let last = "";
	let current = null;
	let wake = () => {};
	let is_stopped = false;

	async function read(signal) {
		const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
		const answer = await ask("GET", path, { headers, signal });
		tell({ state: "live" });
		const work = workshop(take, (id) => (last = id));
		const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
		const parser = new SseParser();
		let watch = 0;
		let until = performance.now() + SLICE_MS;
		try {
			for (;;) {
				clearTimeout(watch);
				watch = setTimeout(() => current?.abort(new Error("silent")), QUIET_MS);
				const { value, done } = await reader.read();
				if (done) break;
				heard();
				await work.add(parser.push(value));
				if (performance.now() > until) {
					await breath(); // what has come already is read without one
					until = performance.now() + SLICE_MS;
				}
			}
			await work.done();
		} finally {
			clearTimeout(watch);
			work.stop();
			reader.cancel().catch(() => {});
		}
	}

	async function run() {
		let pause = FIRST_PAUSE_MS;
		while (!is_stopped) {
			current = new AbortController();
			const began = performance.now();
			let error = null;
			tell({ state: "connecting" });
			try {
				await read(current.signal);
			} catch (caught) {
				error = caught;
			}
			if (is_stopped) return;
			if (error instanceof ApiError && [401, 403, 404].includes(error.status)) {
				tell({ state: "refused", error });
				await new Promise((resume) => (wake = resume));
				pause = FIRST_PAUSE_MS;
				continue;
			}
			if (performance.now() - began > LONGEST_PAUSE_MS) pause = FIRST_PAUSE_MS;
			const wait = pause * (0.75 + Math.random() / 2);
			tell({ state: "waiting", error, retryAt: performance.now() + wait });
			await Promise.race([new Promise((resume) => (wake = resume)), new Promise((resume) => setTimeout(resume, wait))]);
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
		stop() {
			is_stopped = true;
			current?.abort();
			wake();
		},
	};
}

/** Works documents off in slices. */
function workshop(take, passed) {
	let waiting = [];
	let chars = 0;
	let work = null;
	let is_stopped = false;

	async function drain() {
		await null; // so that `work` is set before it is done
		while (waiting.length && !is_stopped) {
			const batch = waiting;
			waiting = [];
			let until = performance.now() + SLICE_MS;
			for (let from = 0; from < batch.length && !is_stopped; from += DOCUMENTS_AT_ONCE) {
				const some = batch.slice(from, from + DOCUMENTS_AT_ONCE);
				take(documents_of(some));
				for (const one of some) {
					chars -= one.data.length;
					if (one.id) passed(one.id);
				}
				if (performance.now() >= until) {
					await breath();
					until = performance.now() + SLICE_MS;
				}
			}
		}
		work = null;
	}

	return {
		/** Take events in; resolves when there is room for more. */
		async add(events) {
			for (const one of events) {
				if (one.data === "[DONE]") continue;
				waiting.push(one);
				chars += one.data.length;
			}
			if (waiting.length) work ??= drain();
			while (chars > MAX_WAITING_CHARS && work) await work;
		},
		done: async () => {
			while (work) await work;
		},
		stop: () => (is_stopped = true),
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
