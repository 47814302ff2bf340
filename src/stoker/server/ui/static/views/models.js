/** The served models: where each is in its life, what it takes, and what can be done about that. */

import { html, useState } from "../dom.js";
import { bytes, count, duration, levelOf, percent, spaced } from "../state/words.js";
import { ActButton, Level, Meter, Table } from "./parts.js";

const IN_MEMORY = new Set(["ready", "loading"]);
const ON_ITS_WAY = new Set(["loading", "downloading", "unloading"]);

export function Models({ state, now, actions, may }) {
	const models = [...state.models.values()];
	if (!models.length) return html`<p class="empty">No model is served.</p>`;
	const columns = [
		["Model", "", (model) => html`<b>${nameOf(model)}</b>${model.label && html` <small class="wide">${model.label}</small>`}`],
		["State", "", (model) => html`<${State} model=${model} />`],
		["Takes", "n", (model) => bytes(sizeOf(model) || null)],
		["Requests", "n wide", (model) => count(model.leases ?? 0)],
		["Stays", "", (model) => stay(model, now)],
		may.administrate && [html`<span class="sr-only">Actions</span>`, "buttons", (model) => html`<${Acts} model=${model} is_used=${model.leases > 0} name=${nameOf(model)} actions=${actions} />`],
	];
	return html`<div class="models"><${Table} label="Models" columns=${columns} rows=${models} keyOf=${nameOf} /></div>`;
}

const nameOf = (model) => model.model;

function sizeOf(model) {
	return Object.entries(model.bytes ?? {}).reduce((sum, [line, size]) => (line === "disk" ? sum : sum + size), 0);
}

function State({ model }) {
	const stage = ON_ITS_WAY.has(model.state) && model.stage && `${spaced(model.stage)} ${percent(model.fraction)}`;
	const notes = [stage, model.error?.message || model.reason, model.degraded?.join("; ")].filter(Boolean);
	return html`<${Level} level=${levelOf(model.state)}>${model.state}<//>
		${notes.map((note) => html` <small>${note}</small>`)}
		${stage && html` <${Meter} fraction=${model.fraction} label="${nameOf(model)}: ${stage}" />`}`;
}

function stay(model, now) {
	if (!IN_MEMORY.has(model.state)) return "";
	if (model.is_pinned) return "pinned";
	return model.unload_in_s == null ? "while it is used" : `${duration(Math.max(0, model.at + model.unload_in_s - now))} more`;
}

/** Unloading a model that is in use parks what runs on it, so that is asked once more. */
function Acts({ model, is_used, name, actions }) {
	const [is_sure, setSure] = useState(false);
	const pin = () => actions.pin(name, !model.is_pinned);
	const is_here = IN_MEMORY.has(model.state);
	const is_asked = is_sure && is_used;
	const unload = () => actions.unload(name).finally(() => setSure(false));
	const ask = () => Promise.resolve(setSure(true));
	return html`
		${is_here && html`<${ActButton} act=${pin} title="A pinned model is never unloaded to make room">${model.is_pinned ? "Unpin" : "Pin"}<//>`}
		${is_here && html`<${ActButton} danger=${is_asked} act=${is_used && !is_sure ? ask : unload}>${is_asked ? "Unload, although in use" : "Unload"}<//>`}
		${!is_here && html`<${ActButton} disabled=${ON_ITS_WAY.has(model.state)} act=${() => actions.load(name)}>Load<//>`}
	`;
}
