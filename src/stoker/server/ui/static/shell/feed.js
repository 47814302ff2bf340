/**
 * The state of the page as signals: what the stream has told, when that was, and how the stream is.
 *
 * Time is the server's: the time of its newest document, and what has passed here since it came. Views are drawn from a
 * published state a few times a second, however many documents come.
 */

import { signal } from "../dom.js";
import { initialState, reduceAll } from "../state/store.js";
import { connection } from "./connection.js";

// Drawing takes cores from the model, where it computes beside this browser.
const PUBLISH_MS = 250;
const CALM_MS = /^(localhost|127\..*|\[::1])$/.test(location.hostname) ? 2000 : 1000;
const CALM = new Set(["steps", "memory", "cache", "machines", "progress", "prefill_progress"]);

export const state = signal(initialState());
export const now = signal(0);
/** {state, error, retryAt, heardAt}: as connection.js tells it; heardAt is performance.now() of the last bytes. */
export const line = signal({ state: "connecting", error: null, retryAt: 0, heardAt: 0 });
/** Of a recording that is played: {speed}, a number or "max"; null: it is live. */
export const replay = signal(null);

let fresh = state.value;
let clock = { at: 0, came: 0 };
let heard_at = 0;
let published_at = -Infinity;
let due = Infinity;
let timer;
let opened = null;

function take(documents) {
	fresh = reduceAll(fresh, documents);
	for (const one of documents) if (one.event === "snapshot") replay.value = one.replay ?? null;
	if (fresh.at > clock.at) clock = { at: fresh.at, came: performance.now() };
	const pause = documents.every((one) => CALM.has(one.what ?? one.event)) ? CALM_MS : PUBLISH_MS;
	const at = Math.max(published_at + pause, performance.now());
	if (at >= due) return;
	due = at;
	clearTimeout(timer);
	timer = setTimeout(publish, at - performance.now());
}

function publish() {
	due = Infinity;
	state.value = fresh;
	tick();
	published_at = performance.now();
	if (heard_at !== line.value.heardAt) line.value = { ...line.value, heardAt: heard_at };
}

function tick() {
	if (!clock.at) return;
	const speed = replay.value?.speed ?? 1;
	const is_still = line.value.state !== "live" || speed === "max";
	const passed = is_still ? 0 : ((performance.now() - clock.came) / 1000) * speed;
	now.value = Math.max(is_still ? clock.at : now.value, clock.at + passed);
}

/** Open the stream; it stays open until the page goes. */
export function open_feed() {
	opened = connection({
		path: "/v1/runtime/events",
		take,
		heard: () => (heard_at = performance.now()),
		tell: (told) => (line.value = { error: null, retryAt: 0, ...told, heardAt: heard_at }),
	});
	setInterval(() => due === Infinity && performance.now() > published_at + CALM_MS / 2 && publish(), CALM_MS);
	addEventListener("online", opened.hurry);
	document.addEventListener("visibilitychange", () => document.hidden || opened.hurry());
}

/** Begin again with another key, and without what the former one was shown. */
export function reopen_feed() {
	fresh = initialState();
	clock = { at: 0, came: 0 };
	state.value = fresh;
	now.value = 0;
	opened?.again({ afresh: true });
}
