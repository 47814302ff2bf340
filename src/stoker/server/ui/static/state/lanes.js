/**
 * The lanes of the last minutes: one for each slot of each model, with a bar for each stay of a request in it.
 *
 * A request that waits stands beside the lane, on a siding: of the slot that it got or had, or in the model's line
 * while it never had one. All positions are times; the view makes them lengths.
 */

import { LANES_SPAN_S } from "./limits.js";
import { NO_SLOT, choicesOf } from "./moves.js";

const LEAST_SPAN_S = 60;
const GROWS_BY_S = 30;
const MAX_SIDINGS = 3;
const MAX_LINE_ROWS = 6;
const MAX_PARTS = 420; // more take too long to draw: then shorter ones are joined, or left out
const MAX_HANDOVERS = 120;
const MIN_WAIT_S = 0.02; // a shorter wait is not drawn

/**
 * {from, to, shown_s, models, handovers, outages}: `models` are {model, title, lanes, line}, of a gate once a machine, a lane
 * {key, slot, number, bars, sidings, num_hidden}; `number` is what the machine calls its slot;
 * a bar {id, index, row, from, to, segments, num}; of bars shorter than `min_s` several (`num`) are one. The right
 * edge is `now`, the left one `span_s` before, or soon before the first request came.
 */
export function lanesOf(state, now, { span_s = LANES_SPAN_S, min_s = 0 } = {}) {
	const rows = rowsIn(state, now - span_s);
	const age_s = Math.max(now - (rows[0]?.arrived_at ?? now), LEAST_SPAN_S);
	const shown_s = Math.min(span_s, Math.ceil(age_s / GROWS_BY_S) * GROWS_BY_S);
	const window = { from: now - shown_s, to: now, shown_s };
	const site = { state, groups: new Map() };
	for (const { model, slot } of state.slots.values()) if (isThere(state, model, slot)) laneOf(site, model, slot);
	for (const row of rows) placeRow(site, row, window);
	const byId = new Map(rows.map((row) => [row.request_id, row]));
	let found = [];
	let least_s = min_s;
	do {
		found = [...site.groups.values()].map((each) => finished(each, least_s));
		least_s = Math.max(least_s * 1.6, 0.1);
	} while (numParts(found) > MAX_PARTS && least_s < span_s);
	found.sort((one, other) => one.title.localeCompare(other.title));
	const handovers = handoversOf(rows, byId, window, state).slice(-MAX_HANDOVERS);
	return { ...window, models: found, handovers, outages: outagesOf(state, window) };
}

/** How many bars and waits there are to be drawn. */
function numParts(models) {
	const inRows = (rows) => rows.reduce((sum, row) => sum + row.length, 0);
	const inLanes = (lanes) => lanes.reduce((sum, lane) => sum + lane.bars.length + inRows(lane.sidings), 0);
	return models.reduce((sum, model) => sum + inLanes(model.lanes) + inRows(model.line.rows), 0);
}

/** Whether a lane is shown although nothing was in it. */
function isThere(state, id, slot) {
	if (state.machines.length) return machineOf(state, id, slot)?.models.includes(id);
	const model = state.models.get(id);
	return !model || (model.state !== "absent" && slot < (model.num_slots ?? Infinity));
}

/** Requests that lived in the window, by arrival. */
function rowsIn(state, from) {
	const rows = [...state.live.values()].filter((row) => !row.num_members); // calls are drawn as their requests
	for (const list of [state.ended, state.members]) {
		for (let at = list.length - 1; at >= 0; at -= 1) {
			if (list[at].ended_at < from) break;
			if (!list[at].num_members) rows.push(list[at]);
		}
	}
	return rows.sort((one, other) => one.arrived_at - other.arrived_at);
}

/** The machine of a gate that a slot is of; undefined: it is the server's own, or that of a machine which is no more. */
function machineOf({ machines }, model, slot) {
	return machines.find(({ slots }) => {
		const [first, num] = slots?.[model] ?? [];
		return slot >= first && slot < first + num;
	});
}

function groupOf({ groups }, model, machine) {
	const where = machine ? `${machine.name}${machine.state === "up" ? "" : ` (${machine.state})`}, ` : "";
	const title = where + model;
	if (!groups.has(title)) groups.set(title, { model, title, lanes: new Map(), waits: [] });
	return groups.get(title);
}

function laneOf(site, model, slot) {
	const machine = machineOf(site.state, model, slot);
	const { lanes } = groupOf(site, model, machine);
	const number = machine ? slot - machine.slots[model][0] : slot;
	const key = `${machine ? `${machine.name} ` : ""}${model}/${number}`;
	if (!lanes.has(slot)) lanes.set(slot, { key, slot, number, bars: [], waits: [] });
	return lanes.get(slot);
}

function placeRow(site, row, window) {
	if (!row.model) return;
	for (const choice of choicesOf(row)) {
		for (const run of choice.runs) {
			const bar = partIn(run, row, choice.index, window);
			if (bar) laneOf(site, row.model, run.slot).bars.push(bar);
		}
		for (const wait of choice.waits) {
			const part = partIn(wait, row, choice.index, window);
			if (!part || part.to - part.from < MIN_WAIT_S) continue;
			if (wait.slot === null) groupOf(site, row.model).waits.push(part);
			else laneOf(site, row.model, wait.slot).waits.push(part);
		}
	}
}

/** What of a run or wait is in the window; null: nothing. */
function partIn(part, row, index, window) {
	const to = part.to ?? window.to;
	if (to <= window.from || part.from >= window.to) return null;
	const segments = [];
	for (const each of part.segments) {
		const from = Math.max(each.from, window.from);
		const until = Math.min(each.to ?? window.to, window.to);
		if (until > from || part.segments.length === 1) segments.push({ ...each, from, to: Math.max(from, until) });
	}
	const bounds = { from: Math.max(part.from, window.from), to: Math.min(to, window.to) };
	return { id: row.request_id, index, row, ...bounds, is_open: part.to === null, segments };
}

function finished(model, min_s) {
	const lanes = [...model.lanes.values()].sort((one, other) => one.slot - other.slot);
	return {
		...model,
		lanes: lanes.map((lane) => {
			const { rows, num_hidden } = stacked(lane.waits, MAX_SIDINGS, min_s);
			return { ...lane, bars: joined(lane.bars, min_s, lane.slot === NO_SLOT), sidings: rows, num_hidden };
		}),
		line: stacked(model.waits, MAX_LINE_ROWS, min_s),
	};
}

/** Put waits into rows without overlap; those of more than `most` rows are counted only. */
function stacked(waits, most, min_s) {
	const rows = [];
	let num_hidden = 0;
	for (const wait of waits.sort((one, other) => one.from - other.from)) {
		if (wait.to - wait.from < min_s && !wait.is_open) continue;
		let row = rows.find((each) => each.at(-1).to <= wait.from);
		if (!row && rows.length < most) rows.push((row = []));
		if (row) row.push(wait);
		else num_hidden += 1;
	}
	return { rows, num_hidden };
}

/** Bars with those joined that are too short to be seen, or share a lane at one time. */
function joined(bars, min_s, is_shared) {
	bars.sort((one, other) => one.from - other.from);
	const found = [];
	for (const bar of bars) {
		const last = found.at(-1);
		const is_short = bar.to - bar.from < min_s && !bar.is_open;
		const is_near = is_short && last?.is_short && bar.from - last.to < min_s;
		if (is_near || (is_shared && bar.from < last?.to)) {
			last.num += 1;
			last.to = Math.max(last.to, bar.to);
		} else {
			found.push({ ...bar, is_short, num: 1 });
		}
	}
	return found;
}

/** Where one request gave its slot to another, or went from one machine to another. */
function handoversOf(rows, byId, window, state) {
	const found = [];
	for (const row of rows) {
		for (const choice of choicesOf(row)) {
			choice.segments.forEach((segment) => {
				const run = choice.runs.find((each) => each.to === segment.from);
				if (segment.kind !== "parked" || !segment.by || !run || segment.from < window.from) return;
				const taker = takerOf(byId.get(segment.by), segment.from);
				found.push({
					at: segment.from,
					model: row.model,
					giver: { id: row.request_id, slot: run.slot },
					taker: { id: segment.by, slot: taker?.slot ?? run.slot, from: taker?.from ?? segment.from },
				});
			});
			choice.runs.forEach((taker, number) => {
				const giver = choice.runs[number - 1];
				const has_moved = giver && machineOf(state, row.model, giver.slot) !== machineOf(state, row.model, taker.slot);
				if (has_moved && taker.from >= window.from) found.push({ at: giver.to, model: row.model, giver, taker });
			});
		}
	}
	return found;
}

const SLACK_S = 0.05; // the two moves of a hand-over are told one after the other

function takerOf(row, at) {
	if (!row) return null;
	const runs = choicesOf(row).flatMap((choice) => choice.runs);
	return runs.find((run) => run.from >= at - SLACK_S) ?? runs.findLast((run) => run.from < at) ?? null;
}

/** When no engine served. */
function outagesOf(state, window) {
	const found = [];
	const moves = state.engine_moves;
	moves.forEach((move, number) => {
		if (["serving", "unknown"].includes(move.state)) return;
		const from = Math.max(move.at, window.from);
		const to = Math.min(moves[number + 1]?.at ?? window.to, window.to);
		const last = found.at(-1);
		if (to <= from) return;
		if (last && last.to === from) Object.assign(last, { to, state: move.state, reason: move.reason || last.reason });
		else found.push({ from, to, state: move.state, reason: move.reason });
	});
	return found;
}
