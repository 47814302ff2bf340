/** Memory: who holds how much, how short it is, and what has been given up for that. */

import { html, useState } from "../dom.js";
import { actions } from "../shell/api.js";
import { ledgerOf } from "../state/selectors.js";
import { bytes, count, duration, percent, spaced } from "../state/words.js";
import { Chart, useSpan } from "./chart.js";
import { ActButton, Level, Meter, Notices, Section, Table } from "./parts.js";

const RUNG_WORDS = {
	trim_allocator: "freed memory goes back to the system",
	drop_snapshots: "stored prefixes go, those on disk first",
	drop_idle_cells: "nothing is kept in cells for later",
	lower_limits: "newcomers find half the slots and cells",
	pause_background: "background stands still",
	unload_idle: "models that nobody uses are unloaded",
	park_interactive: "models leave; what ran on them waits",
};
const PRESSURE = [{ label: "pressure", colour: "--accent", of: (bucket) => bucket.pressure, fill: true }];
const FOOTPRINT = [
	{ label: "held", colour: "--line-1", of: (bucket) => bucket.footprint, fill: true },
	{ label: "available", colour: "--line-3", dash: "dashed", of: (bucket) => bucket.available },
];

export function View(props) {
	const { state, now } = props;
	const memory = state.memory;
	const [span, spans] = useSpan();
	if (!memory?.limit) return html`<div class="view"><p class="empty">Memory has not been measured yet.</p></div>`;
	const chart = { state, now, span };
	const lead = html`<${Level} of=${memory.pressure}>pressure ${memory.pressure ?? "unknown"}<//>
		${percent(memory.pressure_fraction)} by ${memory.pressure_source || "footprint"}${memory.tier ? `, tier ${spaced(memory.tier)}` : ""}`;
	return html`<div class="view memory">
		<${Section} title="Where it is" aside=${lead}>
			<${Ledger} title="This machine" held=${memory.footprint} lines=${memory.lines} marks=${[["limit", memory.limit], ["physical", memory.physical]]} note="${bytes(memory.available)} can still be used" />
			${memory.devices.map((device) => html`<${Device} key=${device.id} device=${device} />`)}
		<//>
		<${Section} title="Over time" aside=${spans}>
			<div class="charts">
				<${Chart} ...${chart} title="Pressure" lines=${PRESSURE} words=${percent} marks=${marksOf(memory)} top=${1} />
				<${Chart} ...${chart} title="Held and available" lines=${FOOTPRINT} words=${bytes} base=${1024} marks=${[{ at: memory.limit, label: "limit", colour: "--bad" }]} />
			</div>
		<//>
		<div class="columns">
			<${Section} title="Given up"><${Ladder} memory=${memory} /><//>
			<${Section} title="What happened"><${Notices} notices=${state.notices} kinds=${["pressure", "rung", "model"]} empty="Nothing since the page was opened." /><//>
		</div>
		<${Section} title="Models"><${Models} ...${props} /><//>
	</div>`;
}

function Device({ device }) {
	const notes = [
		device.free != null && `${bytes(device.free)} free`,
		device.celsius != null && `${Math.round(device.celsius)} °C`,
		device.power_w != null && `${Math.round(device.power_w)} W`,
		device.held_by && `leased by ${device.held_by}`,
	];
	if (!device.total) return null; // it uses the machine's
	return html`<${Ledger} title="${device.id}, ${device.name}" held=${device.own ?? 0} others=${device.others ?? 0} lines=${device.lines} marks=${[["total", device.total]]} note=${notes.filter(Boolean).join(", ")} />`;
}

/** Lines of the ledger as one stacked bar, against the limits that hold for it. */
function Ledger({ title, held, others = 0, lines, marks, note }) {
	const parts = ledgerOf(lines, held);
	if (others > 0) parts.push({ name: "other programs", place: null, size: others });
	const known = marks.filter(([, at]) => at > 0);
	const words = known.map(([name, at]) => `${name} ${bytes(at)}`);
	const whole = Math.max(...known.map(([, at]) => at), parts.reduce((sum, each) => sum + each.size, 0)) || 1;
	const colour = ({ place }) => `var(--line-${place === null ? 7 : (place % 6) + 1})`;
	const told = parts.map((each) => `${spaced(each.name)} ${bytes(each.size)}`).join(", ");
	return html`<div class="ledger">
		<h3>${title} <span class="muted">${bytes(held)}${known[0] ? ` of ${bytes(known[0][1])}` : ""}${note ? `; ${note}` : ""}</span></h3>
		<div class="ledger-bar" role="img" aria-label="${title}: ${told}; ${words.join(", ")}">
			<div class="ledger-parts">${parts.map((each) => html`<i title="${spaced(each.name)} ${bytes(each.size)}" style=${{ width: `${(each.size / whole) * 100}%`, background: colour(each) }}></i>`)}</div>
			${known.map(([name, at]) => html`<span class="ledger-mark ${name}" style=${{ left: `${(at / whole) * 100}%` }}></span>`)}
		</div>
		<ul class="ledger-lines">${parts.map((each) => html`<li><i style=${{ background: colour(each) }}></i>${spaced(each.name)} <b>${bytes(each.size)}</b></li>`)}${known.map(([name, at]) => html`<li><i class="ledger-mark ${name}"></i>${name} <b>${bytes(at)}</b></li>`)}</ul>
	</div>`;
}

/** Where pressure becomes a warning and critical. */
function marksOf({ thresholds }) {
	return [
		{ at: thresholds?.fraction_warning ?? 0.7, label: "warning", colour: "--warn" },
		{ at: thresholds?.fraction_critical ?? 0.85, label: "critical", colour: "--bad" },
	];
}

function Ladder({ memory }) {
	const rungs = memory.ladder?.length ? memory.ladder : memory.rungs;
	if (!rungs.length) return html`<p class="empty">Nothing is given up.</p>`;
	return html`<ol class="ladder" reversed>
		${rungs.toReversed().map((rung) => {
			const is_taken = memory.rungs.includes(rung);
			return html`<li key=${rung} class=${is_taken ? "taken" : ""}><b>${is_taken ? "given up" : "–"}</b><span>${spaced(rung)}</span><small>${RUNG_WORDS[rung] ?? ""}</small></li>`;
		})}
	</ol>`;
}

const IN_MEMORY = new Set(["ready", "loading"]);
const ON_ITS_WAY = new Set(["loading", "downloading", "unloading"]);

/** The served models: where each is in its life, what it takes, and what can be done about that. */
function Models({ state, now, may }) {
	const models = [...state.models.values()];
	if (!models.length) return html`<p class="empty">No model is served.</p>`;
	const columns = [
		["Model", "", (model) => html`<b>${model.model}</b>${model.label && html` <small class="wide">${model.label}</small>`}`],
		["State", "", (model) => html`<${State} model=${model} />`],
		["Takes", "n", (model) => bytes(sizeOf(model) || null)],
		["Requests", "n wide", (model) => count(model.leases ?? 0)],
		["Stays", "", (model) => stay(model, now)],
		may.administrate && [html`<span class="sr-only">Actions</span>`, "buttons", (model) => html`<${Acts} model=${model} />`],
	];
	return html`<div class="models"><${Table} label="Models" columns=${columns} rows=${models} keyOf=${(model) => model.model} /></div>`;
}

function sizeOf(model) {
	return Object.entries(model.bytes ?? {}).reduce((sum, [line, size]) => (line === "disk" ? sum : sum + size), 0);
}

function State({ model }) {
	const stage = ON_ITS_WAY.has(model.state) && model.stage && `${spaced(model.stage)} ${percent(model.fraction)}`;
	const notes = [stage, model.error?.message || model.reason, model.degraded?.join("; ")].filter(Boolean);
	return html`<${Level} of=${model.state} />
		${notes.map((note) => html` <small>${note}</small>`)}
		${stage && html` <${Meter} fraction=${model.fraction} label="${model.model}: ${stage}" />`}`;
}

function stay(model, now) {
	if (!IN_MEMORY.has(model.state)) return "";
	if (model.is_pinned) return "pinned";
	return model.unload_in_s == null ? "while it is used" : `${duration(Math.max(0, model.at + model.unload_in_s - now))} more`;
}

/** Unloading a model that is in use parks what runs on it, so that is asked once more. */
function Acts({ model }) {
	const name = model.model;
	const is_used = model.leases > 0;
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
