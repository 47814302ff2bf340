/**
 * Figures over time: a bucket a second for five minutes, and one every ten seconds for an hour.
 *
 * A bucket has sums (of what happened in it) and gauges (the last figure, which the next begins with).
 */

import { COARSE_SPAN_S, COARSE_STEP_S, FINE_SPAN_S, FINE_STEP_S } from "./limits.js";

const COUNTED = ["tokens", "prompt_tokens", "num_steps", "steps_ms", "queries", "hits", "longest_ms"];
const SERIES = [
	["fine", FINE_STEP_S, FINE_SPAN_S],
	["coarse", COARSE_STEP_S, COARSE_SPAN_S],
];

/** Take figures at a moment. `sums` are added, `gauges` replace, the highest `peaks` are kept. */
export function tookFigures(draft, at, { sums = {}, gauges = {}, peaks = {} }) {
	for (const [name, step_s, span_s] of SERIES) {
		const list = draft.list(name);
		const time = Math.floor(at / step_s) * step_s;
		const bucket = { ...bucketAt(list, time, step_s, span_s), ...gauges };
		for (const key in sums) bucket[key] = (bucket[key] ?? 0) + (sums[key] ?? 0);
		for (const key in peaks) bucket[key] = Math.max(bucket[key] ?? 0, peaks[key] ?? 0);
		list[list.length - 1] = bucket;
	}
}

/** The newest bucket, for late figures too. Of a gap both ends are made: lines fall to nothing. */
function bucketAt(list, time, step_s, span_s) {
	const last = list.at(-1);
	if (last && time <= last.time) return last;
	if (last && time - last.time > step_s) list.push(after(last, last.time + step_s));
	if (last && time - last.time > 2 * step_s) list.push(after(last, time - step_s));
	const bucket = after(last, time);
	list.push(bucket);
	const num_old = list.findIndex((each) => each.time > time - span_s);
	if (num_old > 0) list.splice(0, num_old);
	return bucket;
}

function after(last, time) {
	const bucket = { ...last, time };
	for (const name of COUNTED) bucket[name] = 0;
	return bucket;
}

/** Columns for a chart: {times, values by column}, without the bucket that is not over at `now`. `columns` are functions
 *  of a bucket and its seconds to a figure or null. */
export function columnsOf(state, name, now, columns) {
	const [, step_s, span_s] = SERIES.find((each) => each[0] === name);
	const buckets = state[name].filter((each) => each.time > now - span_s && each.time + step_s <= now);
	const last = state[name].at(-1);
	if (last && now - last.time > 2 * step_s) {
		buckets.push(after(last, last.time + step_s), after(last, Math.floor(now) - step_s));
	}
	const values = {};
	for (const key in columns) values[key] = buckets.map((each) => columns[key](each, step_s) ?? null);
	return { times: buckets.map((each) => each.time), values };
}
