/** What a request did when: its moves as segments, and these as runs in a slot and waits between them. */

const IN_SLOT = new Set(["prefill", "decode", "replayed"]);
/** Of work that needs none: its lane is the last one. */
export const NO_SLOT = Infinity;
const cache = new WeakMap(); // rows never change, so what follows from one neither

/**
 * The choices of a request: [{index, segments, runs, waits}]. A segment is {kind, from, to, slot, reason, by}, a run or
 * wait {from, to, slot, segments}; `to` is null while it lasts. A wait has the slot of the run after it, else before
 * it, else null. Kinds are the states of moves, and `replayed`: prefill of what an engine that ended had computed.
 */
export function choicesOf(row) {
	let found = cache.get(row);
	if (!found) {
		const indices = new Set(row.moves.map((move) => move.index ?? 0));
		if (indices.size === 0) indices.add(0);
		const most = [...indices].sort((one, other) => one - other).slice(0, 32);
		found = most.map((index) => choiceOf(row, index));
		cache.set(row, found);
	}
	return found;
}

function choiceOf(row, index) {
	const segments = segmentsOf(row, index);
	const parts = [];
	for (const each of segments) {
		const is_run = IN_SLOT.has(each.kind);
		const last = parts.at(-1);
		if (last && last.is_run === is_run && (!is_run || last.slot === each.slot)) {
			last.segments.push(each);
			last.to = each.to;
		} else {
			parts.push({ is_run, from: each.from, to: each.to, slot: is_run ? each.slot : null, segments: [each] });
		}
	}
	parts.forEach((part, number) => {
		if (!part.is_run) part.slot = parts[number + 1]?.slot ?? parts[number - 1]?.slot ?? null;
	});
	return { index, segments, runs: parts.filter((part) => part.is_run), waits: parts.filter((part) => !part.is_run) };
}

function segmentsOf(row, index) {
	const moves = row.moves.filter((move) => move.index === null || move.index === index);
	const segments = [];
	let has_run = false;
	let is_lost = false; // what it had computed went with an engine
	for (const [number, move] of moves.entries()) {
		if (move.state === "ended") break;
		if (move.state === "held" && has_run) is_lost = true;
		const kind = move.state === "prefill" && is_lost ? "replayed" : move.state;
		if (move.state === "decode") is_lost = false;
		const next = moves[number + 1];
		const last = segments.at(-1);
		const to = next ? next.at : row.state === "ended" ? (row.ended_at ?? move.at) : null;
		const slot = IN_SLOT.has(kind) ? (move.slot ?? last?.slot ?? NO_SLOT) : null;
		has_run ||= slot !== null;
		if (last && last.kind === kind && last.slot === slot) {
			last.to = to;
			last.reason = move.reason || last.reason;
			last.by = move.by ?? last.by;
		} else {
			segments.push({ kind, from: move.at, to, slot, reason: move.reason, by: move.by });
		}
	}
	return segments;
}
