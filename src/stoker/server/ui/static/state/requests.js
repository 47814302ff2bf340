/** Requests as documents tell of them: rows of the live ones, and a history. */

import { MAX_ENDED, MAX_LIVE, MAX_MEMBERS, MAX_MOVES, MAX_OLD_MOVES, MAX_WITH_MOVES } from "./limits.js";

const TEXTS = ["model", "priority", "kind", "route", "state", "waits_for", "waited_for", "finish_reason", "cache_source", "stage"];
const FIGURES = [
	"request_id", "group", "arrived_at", "position", "eta_s", "prompt_tokens", "cached_tokens", "processed_tokens",
	"completion_tokens", "max_tokens", "queue_s", "first_token_s", "decode_s", "end_to_end_s", "tokens_per_second",
	"itl_ms", "num_parks", "parked_s", "num_restarts", "draft_tokens", "accepted_tokens", "error", "num_moves",
	"num_members", "num_done", "fraction",
];
const ENDS = new Set(["finished", "failed"]);
/** States in which a request does not compute. */
export const WAITS = new Set(["queued", "prefix_wait", "held", "preparing", "parked", "paused", "loading", "downloading"]);
const FURTHEST = ["decode", "prefill", "parked", "prefix_wait", "queued", "preparing", "held", "paused"];

/** The row of a snapshot, or of the fields of an event, with what the page adds. */
function rowOf(fields, before) {
	const row = { ...before };
	for (const name of FIGURES) if (fields[name] !== undefined) row[name] = fields[name];
	for (const name of TEXTS) if (fields[name] !== undefined) row[name] = interned(fields[name]);
	if (fields.moves) row.moves = fields.moves.slice(-MAX_MOVES).map(moveOf);
	row.moves ??= [];
	row.num_moves = Math.max(row.num_moves ?? 0, row.moves.length);
	row.state ??= row.moves.at(-1)?.state ?? "held";
	return row;
}

function moveOf(move) {
	return {
		at: move.at,
		state: interned(move.state),
		index: move.index ?? null,
		slot: move.slot ?? null,
		reason: interned(move.reason ?? ""),
		by: move.by ?? null,
	};
}

/** When an ended request ended, in seconds since the epoch. */
export function endedAt(row) {
	const last = row.moves.at(-1);
	if (last?.state === "ended") return last.at;
	return row.ended_at ?? row.arrived_at + (row.end_to_end_s ?? 0);
}

/** Identity of a request over restarts of the server, which may give an id twice. */
function identityOf(row) {
	return `${row.request_id}@${row.arrived_at}`;
}

export function requestMoved(draft, doc) {
	const id = doc.request_id;
	if (!id) return;
	if (ENDS.has(doc.what)) return ended(draft, doc);
	const before = draft.state.live.get(id);
	if (!before && !doc.move && doc.arrived_at === undefined) return; // its beginning was before this stream
	const row = rowOf(doc, before ?? { request_id: id, arrived_at: doc.at });
	if (doc.move) takeMove(row, before, doc);
	if (doc.what === "prefill_progress") takeProgress(row, doc);
	if (!WAITS.has(row.state)) row.position = row.eta_s = null;
	setLive(draft, row);
}

function takeMove(row, before, doc) {
	const move = moveOf(doc.move);
	if (!doc.moves) {
		row.moves = [...(before?.moves ?? []), move];
		if (row.moves.length > MAX_MOVES) row.moves.shift();
		row.num_moves = doc.num_moves ?? (before?.num_moves ?? 0) + 1;
	}
	row.state = stateOf(row.moves);
	if (move.state === "parked" && doc.num_parks === undefined) row.num_parks = (row.num_parks ?? 0) + 1;
	if (doc.what === "replayed" && doc.num_restarts === undefined) row.num_restarts = (row.num_restarts ?? 0) + 1;
	row.waits_for = WAITS.has(row.state) ? interned(doc.waits_for ?? move.reason) : "";
}

/** Of several choices the state of the one that is furthest counts. */
function stateOf(moves) {
	const latest = new Map();
	for (const move of moves) {
		if (move.index === null) latest.clear();
		latest.set(move.index ?? 0, move.state);
	}
	const states = new Set(latest.values());
	return FURTHEST.find((state) => states.has(state)) ?? moves.at(-1).state;
}

function takeProgress(row, doc) {
	row.prompt_tokens = doc.total ?? row.prompt_tokens;
	row.cached_tokens = doc.cached ?? row.cached_tokens;
	row.processed_tokens = doc.processed ?? row.processed_tokens;
}

function setLive(draft, row) {
	const live = draft.map("live");
	live.set(row.request_id, row);
	if (live.size > MAX_LIVE) live.delete(live.keys().next().value);
}

function ended(draft, doc) {
	const before = draft.state.live.get(doc.request_id);
	const row = rowOf(doc, before);
	if (doc.move && !doc.moves) {
		row.moves = [...row.moves, moveOf(doc.move)].slice(-MAX_MOVES);
		row.num_moves = doc.num_moves ?? row.num_moves + 1;
	}
	row.state = "ended";
	row.position = row.eta_s = null;
	row.ended_at = row.moves.at(-1)?.state === "ended" ? row.moves.at(-1).at : doc.at;
	row.arrived_at ??= row.ended_at;
	if (before) draft.map("live").delete(row.request_id);
	membersEnded(draft, row);
	if (row.group) draft.append("members", row, MAX_MEMBERS);
	else remember(draft, row);
}

/** The requests that a call was made of have no end of their own: they go with it. */
function membersEnded(draft, group) {
	for (const row of draft.state.live.values()) {
		if (row.group !== group.request_id) continue;
		draft.map("live").delete(row.request_id);
		draft.append("members", { ...row, state: "ended", ended_at: group.ended_at }, MAX_MEMBERS);
	}
}

function remember(draft, row) {
	draft.append("ended", row, MAX_ENDED);
	draft.state.num_ended += 1;
	const list = draft.state.ended;
	const old = list.length - 1 - MAX_WITH_MOVES;
	if (old >= 0 && list[old].moves.length > MAX_OLD_MOVES) list[old] = shortened(list[old]);
}

function shortened(row) {
	const first = row.moves.slice(0, MAX_OLD_MOVES / 4);
	return { ...row, moves: [...first, ...row.moves.slice(first.length - MAX_OLD_MOVES)] };
}

/** Live requests are those of the snapshot and no others; what ended meanwhile joins the history. */
export function requestsReplaced(draft, doc) {
	const live = new Map();
	for (const fields of [...(doc.requests ?? []), ...(doc.groups ?? [])]) {
		if (fields.request_id && live.size < MAX_LIVE) live.set(fields.request_id, rowOf(fields, null));
	}
	draft.own("live", live);
	const known = new Set(draft.state.ended.slice(-512).map(identityOf));
	for (const fields of doc.recent ?? []) {
		if (known.has(identityOf(fields))) continue;
		const row = rowOf(fields, null);
		row.state = "ended";
		row.ended_at = endedAt(row);
		remember(draft, row);
	}
}

const known = new Map();
const MAX_KNOWN = 4096;

/** The same text as one object: thousands of moves have the same few reasons. */
function interned(text) {
	if (typeof text !== "string") return text;
	const found = known.get(text);
	if (found !== undefined) return found;
	if (known.size >= MAX_KNOWN) known.clear();
	known.set(text, text);
	return text;
}
