/** Figures and states as people read them. */

const SEGMENTS = {
	queued: "waits",
	preparing: "is prepared",
	held: "no engine",
	prefix_wait: "waits for a prefix",
	prefill: "reads",
	decode: "writes",
	replayed: "reads again",
	parked: "parked",
	paused: "paused",
	ended: "ended",
};
const ENDS = {
	stop: "came to its end",
	length: "at its token limit",
	cancelled: "cancelled",
	tool_calls: "it calls a tool",
};
const LEVELS = {
	good: ["normal", "nominal", "serving", "ready", "up"],
	warn: ["warning", "serious", "starting", "suspended", "loading", "downloading", "unloading", "draining", "trial"],
	bad: ["critical", "restarting", "failed", "down"],
};
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NONE = "–";

/** A state or kind of segment, in a word or two. */
export function stateWords(kind) {
	return SEGMENTS[kind] ?? kind ?? NONE;
}

/** How bad a state of the machine, an engine or a model is: good, warn, bad or nothing. */
export function levelOf(state) {
	return Object.keys(LEVELS).find((level) => LEVELS[level].includes(state)) ?? "";
}

export function endWords(row) {
	if (row.error) return row.error.message || row.error.code;
	if (row.kind === "load" && row.finish_reason === "stop") return "loaded";
	return ENDS[row.finish_reason] ?? row.finish_reason ?? NONE;
}

/** Why an engine is where it is, unless that says no more than its state, or which process it is. */
export function whyOf({ state, reason }) {
	return !reason || state.startsWith(reason) || reason.startsWith("pid ") ? "" : reason;
}

/** Seconds: "840 ms", "4.2 s", "3 min 20 s", "2 h 05 min". */
export function duration(seconds) {
	if (!Number.isFinite(seconds)) return NONE;
	const s = Math.max(0, seconds);
	if (s < 0.00005) return "0 s";
	if (s < 0.9995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
	if (s < 59.95) return `${s.toFixed(s < 9.95 ? 1 : 0)} s`;
	if (s < 3599.5) {
		const whole = Math.round(s);
		return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
	}
	const minutes = Math.round(s / 60);
	if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
	return `${Math.round(minutes / 1440)} days`;
}

export const milliseconds = (ms) => (ms === 0 ? "0 ms" : duration(ms && ms / 1000));

/** Bytes: "1.4 GiB". */
export function bytes(size) {
	if (!Number.isFinite(size)) return NONE;
	let unit = 0;
	let value = Math.max(0, size);
	while (value >= 1023.5 && unit < UNITS.length - 1) {
		value /= 1024;
		unit += 1;
	}
	return `${value.toFixed(unit > 0 && value < 9.95 ? 1 : 0)} ${UNITS[unit]}`;
}

/** A whole number with thin spaces between thousands. */
export function count(number) {
	if (!Number.isFinite(number)) return NONE;
	return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function plural(number, noun) {
	return `${count(number)} ${noun}${number === 1 ? "" : /[sx]$/.test(noun) ? "es" : "s"}`;
}

export function rate(perSecond) {
	if (!Number.isFinite(perSecond)) return NONE;
	if (perSecond === 0) return "0";
	return perSecond < 9.95 ? perSecond.toFixed(1) : count(perSecond);
}

export function percent(fraction) {
	if (!Number.isFinite(fraction)) return NONE;
	return `${Math.round(fraction * 100)} %`;
}

export function clockTime(at) {
	return new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** Names without underscores. */
export function spaced(name) {
	return String(name ?? "").replaceAll("_", " ");
}

const LONG_ID = /\b(?:[a-z]+[-_])?([0-9a-f]{6})[0-9a-f]{8,}\b/g;

/** A text in which ids that nobody reads to their end are cut to six figures: "chatcmpl-9907f62fde…" to "9907f6". */
export function briefly(text) {
	return String(text ?? "").replace(LONG_ID, "$1");
}
