/** What views ask of the state. */

import { WAITS } from "./requests.js";

const MAX_DEPTH = 64;
const RANK = { queued: 0, prefix_wait: 0, preparing: 1, held: 1, parked: 0, paused: 2, loading: 3, downloading: 3 };

/** Live requests that do not compute, the next one first, those that stand still last. */
export function lineOf(state) {
	const waiting = [...state.live.values()].filter((row) => WAITS.has(row.state) && !row.group);
	const place = (row) => row.position ?? Infinity;
	return waiting.sort(
		(one, other) =>
			RANK[one.state] - RANK[other.state] || place(one) - place(other) || one.arrived_at - other.arrived_at,
	);
}

/** Live requests that hold a slot, by arrival. */
export function runningOf(state) {
	return [...state.live.values()].filter((row) => !WAITS.has(row.state) && row.state !== "ended");
}

/** A request by its id: live, else the last that ended with it; null: not known. */
export function requestOf(state, id) {
	const live = state.live.get(id);
	if (live) return live;
	for (const list of [state.ended, state.members]) {
		const found = list.findLast((row) => row.request_id === id);
		if (found) return found;
	}
	return null;
}

/** Stored prefixes as a tree, laid out depth first, the largest first: [{prefix, depth, num_children}]. */
export function cacheTree(cache) {
	const prefixes = cache?.prefixes ?? [];
	const ids = new Set(prefixes.map((each) => each.id));
	const children = new Map();
	for (const each of prefixes) {
		const parent = each.parent !== each.id && ids.has(each.parent) ? each.parent : null;
		if (!children.has(parent)) children.set(parent, []);
		children.get(parent).push(each);
	}
	for (const each of children.values()) each.sort((one, other) => weight(other, children) - weight(one, children));
	const laid = [];
	layOut(children, null, 0, laid);
	return laid;
}

function weight(prefix, children) {
	return Math.max(prefix.num_tokens, ...(children.get(prefix.id) ?? []).map((each) => each.num_tokens));
}

function layOut(children, parent, depth, laid) {
	for (const prefix of children.get(parent) ?? []) {
		laid.push({ prefix, depth, num_children: children.get(prefix.id)?.length ?? 0 });
		if (depth < MAX_DEPTH) layOut(children, prefix.id, depth + 1, laid);
	}
}

const LINES = ["weights", "kv", "compute", "cache", "parked"];

/** Ledger lines of a device or the machine in an order that stays, and the rest of what is held; `place` of a line
 *  is its number among all lines. */
export function ledgerOf(lines, held) {
	const names = [...LINES, ...Object.keys(lines ?? {}).filter((name) => !LINES.includes(name) && name !== "disk").sort()];
	const found = names.map((name, place) => ({ name, place, size: lines?.[name] ?? 0 })).filter((each) => each.size > 0);
	const known = found.reduce((sum, each) => sum + each.size, 0);
	if (held > known) found.push({ name: "unaccounted", place: null, size: held - known });
	return found;
}

/** Figures of the whole machine over the last seconds: tokens in and out a second, milliseconds a step. */
export function paceOf(state, now, over_s = 5) {
	const buckets = state.fine.filter((each) => each.time > now - over_s - 1 && each.time + 1 <= now);
	const sum = (name) => buckets.reduce((total, each) => total + (each[name] ?? 0), 0);
	const num_steps = sum("num_steps");
	return {
		tokens_per_second: sum("tokens") / over_s,
		prompt_tokens_per_second: sum("prompt_tokens") / over_s,
		step_ms: num_steps ? sum("steps_ms") / num_steps : null,
	};
}
