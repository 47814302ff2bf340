/** The story of a request: every move with its time and its reason, in words. */

import { endedAt } from "./requests.js";
import { briefly, count, endWords, plural } from "./words.js";

const IN_SLOT = new Set(["prefill", "decode"]);

/** [{at, offset_s, for_s, kind, text, by}], the oldest first; `by` is the id of another request that the text names. */
export function storyOf(row, now) {
	const told = [];
	const context = { has_run: false, was_parked: false, is_lost: false, names: {}, row };
	const num_before = (row.num_moves ?? row.moves.length) - row.moves.length;
	const is_cut = num_before > 0;
	if (!is_cut || row.moves[0]?.at === row.arrived_at) told.push(arrival(row));
	if (is_cut) told.push({ ...arrival(row), kind: "", text: `${plural(num_before, "move")} not shown` });
	for (const move of row.moves) {
		const kind = move.state === "prefill" && context.is_lost ? "replayed" : move.state;
		const which = move.index !== null && move.index > 0 ? `choice ${move.index + 1}: ` : "";
		told.push({ at: move.at, kind, text: which + textOf(move, context), by: move.by });
		noted(move, context);
	}
	const end = row.state === "ended" ? endedAt(row) : now;
	if (row.state === "ended" && told.at(-1).kind !== "ended") told.push({ at: end, kind: "ended", text: endWords(row), by: null }); // a call
	return told.map((each, number) => ({
		...each,
		text: briefly(each.text),
		offset_s: each.at - row.arrived_at,
		for_s: Math.max(0, (told[number + 1]?.at ?? end) - each.at),
	}));
}

function arrival(row) {
	const from = row.route && row.route !== "library" ? `by ${row.route}` : "from the library";
	const tokens = row.prompt_tokens ? `, ${plural(row.prompt_tokens, "token")}` : "";
	return { at: row.arrived_at, kind: "arrived", text: `${row.priority ?? "request"} ${row.kind ?? ""} ${from}${tokens}`.trim(), by: null };
}

function textOf(move, context) {
	const { row } = context;
	if (move.state === "ended") return endWords(row);
	const is_told = move.reason.startsWith("slot "); // with what it found there
	const name = context.names[move.slot] ?? `slot ${move.slot}`;
	const where = !IN_SLOT.has(move.state) || move.slot === null ? "" : `in ${is_told ? move.reason : name}`;
	const why = is_told ? "" : move.reason;
	if (move.state === "decode") return joinedWords(context.has_decoded ? "writes on" : "writes its first token", where, why);
	if (move.state === "prefill") return joinedWords(beginning(context), where, !is_told && storedWords(context), why);
	return move.reason || WORDS[move.state] || move.state;
}

const WORDS = {
	queued: "stands in the queue",
	preparing: "its prompt becomes tokens",
	held: "no engine has it",
	prefix_wait: "another request computes its beginning",
	parked: "gave its slot to another request",
	paused: "stands still until it is resumed",
};

function beginning({ row, has_run, is_lost, was_parked }) {
	if (is_lost) return "reads again what the engine had";
	if (was_parked) return "goes on";
	if (has_run) return "reads on";
	if (!row.prompt_tokens) return "reads its prompt";
	return `reads ${plural(row.prompt_tokens, "token")}`;
}

function storedWords({ row, has_run }) {
	if (has_run || !row.cached_tokens) return "";
	return `${count(row.cached_tokens)} of them stored${row.cache_source ? ` (${row.cache_source})` : ""}`;
}

function joinedWords(...parts) {
	return parts.filter(Boolean).join(", ").replace(/, in slot/, " in slot");
}

function noted(move, context) {
	if (move.slot !== null) context.names[move.slot] ??= move.reason.match(/^slot \d+/)?.[0];
	if (move.state === "held" && context.has_run) context.is_lost = true;
	if (move.state === "parked" || move.state === "paused") context.was_parked = true;
	if (move.state === "decode") {
		context.is_lost = context.was_parked = false;
		context.has_decoded = true;
	}
	context.has_run ||= IN_SLOT.has(move.state);
}
