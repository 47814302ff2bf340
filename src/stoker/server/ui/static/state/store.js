/**
 * The state of the page: what documents of `/v1/runtime/events` have told so far. Pure: time comes with the
 * documents. Every collection is bounded (`limits.js`).
 */

import { MAX_ENGINE_MOVES, MAX_LANES, MAX_MACHINES, MAX_MODELS, MAX_NOTICES } from "./limits.js";
import { requestMoved, requestsReplaced } from "./requests.js";
import { tookFigures } from "./series.js";
import { levelOf, spaced, whyOf } from "./words.js";

export function initialState() {
	return {
		at: 0, // of the newest document, seconds since the epoch
		version: "",
		may: {},
		engine: { state: "unknown", reason: "", restarts: 0, label: "", since: 0 },
		slots: new Map(), // "model/slot" -> {model, slot}
		live: new Map(), // request_id -> row
		ended: [], // rows, oldest first
		members: [], // ended requests of calls: for the lanes only
		num_ended: 0, // since the page was opened, with those the history has dropped
		models: new Map(), // id -> model
		machines: [], // of a gate
		memory: null,
		cache: null,
		heat: { level: "nominal" },
		steps: new Map(), // model -> its last `steps`
		exits: [],
		engine_moves: [], // {at, state, reason}
		notices: [], // {at, kind, level, text}
		fine: [],
		coarse: [],
		num_documents: 0,
		num_lost: 0, // events that this page read too slowly to get
	};
}

export function reduceAll(state, documents) {
	const draft = new Draft(state);
	for (const doc of documents) {
		const apply = APPLY[doc?.event];
		draft.state.num_documents += 1;
		if (doc?.at > draft.state.at) draft.state.at = doc.at;
		if (apply) apply(draft, doc);
	}
	return draft.state;
}

const APPLY = Object.assign(Object.create(null), {
	snapshot: tookSnapshot,
	request: tookRequest,
	steps: tookSteps,
	memory: tookMemory,
	cache: tookCache,
	model: tookModel,
	engine: tookEngine,
	pressure: tookPressure,
	rung: tookRung,
	heat: tookHeat,
	machines: tookMachines,
});

function tookSnapshot(draft, doc) {
	const state = draft.state;
	state.version = doc.version ?? state.version;
	state.may = { ...doc.may, steer: !doc.replay }; // only requests that one may steer are told of
	if (doc.dropped) {
		state.num_lost += doc.dropped;
		notice(draft, doc.at, "page", "warn", `${doc.dropped} events came faster than this page read them`);
	}
	draft.own("slots", new Map());
	for (const slot of doc.slots ?? []) seeLane(draft, slot.model, slot.slot);
	tookMachines(draft, doc);
	draft.own("models", new Map((doc.models ?? []).slice(0, MAX_MODELS).map((each) => [each.model, { ...each, at: doc.at }])));
	draft.own("steps", new Map());
	requestsReplaced(draft, doc);
	draft.own("exits", (doc.exits ?? []).slice(-16));
	if (doc.engine) engineIs(draft, doc.at - (doc.engine.for_s ?? 0), doc.engine);
	for (const part of ["heat", "memory", "cache"]) if (doc[part]) APPLY[part](draft, { at: doc.at, ...doc[part] });
	for (const each of doc.steps ?? []) draft.map("steps").set(each.model, { at: doc.at, ...each });
}

function tookRequest(draft, doc) {
	requestMoved(draft, doc);
	const row = draft.state.live.get(doc.request_id);
	if (doc.move?.slot != null) seeLane(draft, row?.model ?? doc.model, doc.move.slot);
}

function seeLane(draft, model, slot) {
	if (model == null || slot == null) return;
	const key = `${model}/${slot}`;
	if (draft.state.slots.has(key) || draft.state.slots.size >= MAX_LANES) return;
	draft.map("slots").set(key, { model, slot });
}

function tookMachines(draft, { at, machines = [] }) {
	draft.state.machines = machines.slice(0, MAX_MACHINES).map((each) => ({ ...each, at }));
	for (const { slots } of draft.state.machines) {
		for (const model in slots) {
			const [first, num] = slots[model];
			for (let slot = first; slot < first + num; slot += 1) seeLane(draft, model, slot);
		}
	}
}

function tookSteps(draft, doc) {
	draft.map("steps").set(doc.model, doc);
	if (draft.state.steps.size > MAX_MODELS) draft.map("steps").delete(draft.state.steps.keys().next().value);
	const { tokens, prompt_tokens, num_steps = 0, step_ms = 0, longest_ms, target_ms = null } = doc;
	const sums = { tokens, prompt_tokens, num_steps, steps_ms: step_ms * num_steps };
	tookFigures(draft, doc.at, { sums, peaks: { longest_ms }, gauges: { target_ms } });
}

const NOTHING = { lines: {}, devices: [], rungs: [] };

function tookMemory(draft, doc) {
	draft.state.memory = { ...NOTHING, ...doc };
	const fullest = doc.limit ? doc.footprint / doc.limit : null;
	const gauges = { pressure: doc.pressure_fraction ?? fullest, footprint: doc.footprint, available: doc.available };
	tookFigures(draft, doc.at, { gauges });
}

function tookCache(draft, doc) {
	const before = draft.state.cache;
	draft.state.cache = doc.prefixes ? doc : { ...doc, prefixes: [] };
	const sums = {};
	if (before && doc.queries_total >= before.queries_total) {
		sums.queries = doc.queries_total - before.queries_total;
		sums.hits = Math.max(0, doc.hits_total - before.hits_total);
	}
	const gauges = {
		hit_rate: doc.hit_rate ?? null,
		ram_bytes: doc.ram?.bytes ?? null,
		disk_bytes: doc.disk?.bytes ?? null,
	};
	tookFigures(draft, doc.at, { sums, gauges });
}

const TOLD_OF_MODELS = new Set(["ready", "failed", "absent", "suspended"]);

function tookModel(draft, doc) {
	const { event, at, id, what, ...fields } = doc;
	const name = fields.model;
	const before = draft.state.models.get(name);
	const models = draft.map("models");
	models.set(name, { ...before, stage: "", reason: "", error: null, fraction: 0, ...fields, at });
	if (models.size > MAX_MODELS) models.delete(models.keys().next().value);
	for (let slot = 0; doc.state === "ready" && slot < (doc.num_slots ?? 0); slot += 1) seeLane(draft, name, slot);
	if (before?.state !== doc.state && TOLD_OF_MODELS.has(doc.state)) {
		const why = doc.error?.message ?? doc.reason;
		notice(draft, at, "model", levelOf(doc.state), `${name}: ${doc.state}${why ? `, ${why}` : ""}`);
	}
}

function tookEngine(draft, doc) {
	const before = draft.state.engine;
	const is_exit = doc.state === "restarting" && !["restarting", "suspended"].includes(before.state); // else it wakes up
	if (is_exit) engineEnded(draft, doc);
	engineIs(draft, doc.at, { ...before, restarts: (before.restarts ?? 0) + (is_exit ? 1 : 0), ...doc });
	if (before.state !== doc.state) {
		const why = whyOf(doc);
		notice(draft, doc.at, "engine", levelOf(doc.state), `engine ${doc.state}${why && `: ${why}`}`);
	}
}

/** The snapshot tells more of an end; until there is one, this is what the page saw of it. */
function engineEnded(draft, doc) {
	const { since, pid } = draft.state.engine;
	const seen = { pid, served_s: since ? doc.at - since : null, num_survived: draft.state.live.size, num_failed: 0 };
	draft.append("exits", { at: doc.at, reason: doc.reason ?? "", next_start_s: null, ...seen }, 16);
}

function engineIs(draft, since, { event, at, id, for_s, ...fields }) {
	const before = draft.state.engine;
	const has_moved = before.state !== fields.state;
	draft.state.engine = { ...fields, since: has_moved ? since : before.since };
	if (has_moved) draft.append("engine_moves", { at: since, state: fields.state, reason: fields.reason ?? "" }, MAX_ENGINE_MOVES);
}

function tookPressure(draft, doc) {
	const memory = draft.state.memory ?? NOTHING;
	if (memory.pressure !== doc.level) {
		notice(draft, doc.at, "pressure", levelOf(doc.level), `memory pressure ${doc.level}${doc.source ? ` (${doc.source})` : ""}`);
	}
	draft.state.memory = { ...memory, pressure: doc.level, pressure_fraction: doc.fraction, pressure_source: doc.source };
	tookFigures(draft, doc.at, { gauges: { pressure: doc.fraction } });
}

function tookRung(draft, doc) {
	const memory = draft.state.memory ?? NOTHING;
	const others = memory.rungs.filter((each) => each !== doc.rung);
	draft.state.memory = { ...memory, rungs: doc.is_undone ? others : [...others, doc.rung] };
	const [level, told] = doc.is_undone ? ["good", "allowed again"] : ["warn", "given up"];
	notice(draft, doc.at, "rung", level, `${told}: ${spaced(doc.rung)}`);
}

function tookHeat(draft, doc) {
	const { event, at, id, ...heat } = doc;
	if (draft.state.heat.level !== heat.level) {
		notice(draft, at, "heat", levelOf(heat.level), `heat ${heat.level}${heat.sensor ? ` (${heat.sensor})` : ""}`);
	}
	draft.state.heat = heat;
	if (heat.celsius != null) tookFigures(draft, at, { gauges: { celsius: heat.celsius } });
}

function notice(draft, at, kind, level, text) {
	draft.append("notices", { at, kind, level, text }, MAX_NOTICES);
}

/**
 * A state that is being made from another one: each collection is copied before its first change, so that the
 * old state stays as it was, and once however many documents are applied.
 */
class Draft {
	constructor(state) {
		this.state = { ...state };
		this.owned = new Set();
	}

	map(name) {
		if (!this.owned.has(name)) this.own(name, new Map(this.state[name]));
		return this.state[name];
	}

	list(name) {
		if (!this.owned.has(name)) this.own(name, this.state[name].slice());
		return this.state[name];
	}

	own(name, value) {
		this.owned.add(name);
		this.state[name] = value;
	}

	/** Append to a list, and drop its oldest entries past `most`. */
	append(name, entry, most) {
		const list = this.list(name);
		list.push(entry);
		if (list.length > most) list.splice(0, list.length - most);
	}
}
