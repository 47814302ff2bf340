/** What happens now: the slots over the last minutes, who computes, and who waits for what. */

import { html, useEffect, useMemo, useState } from "../dom.js";
import { lineOf, paceOf, runningOf } from "../state/selectors.js";
import { briefly, count, duration, levelOf, milliseconds, percent, plural, rate, stateWords, whyOf } from "../state/words.js";
import { LaneLegend, Lanes } from "./lanes.js";
import { Choice, ClassBadge, Level, Meter, RequestLink, Section, StateMark, Table } from "./parts.js";

const SPANS = [
	[60, "1 min"],
	[300, "5 min"],
];
const MAX_ROWS = 40;
const COLUMNS = [
	["Request", "", (row) => html`<${RequestLink} id=${row.request_id} />`],
	["Class", "", (row) => row.kind !== "load" && html`<${ClassBadge} priority=${row.priority} />`],
	["Model", "wide nowrap", (row) => row.model],
];
const isGrave = (state) => ["warn", "bad"].includes(levelOf(state));

export function View(props) {
	const { state, now } = props;
	const [span_s, setSpan] = useState(300);
	const [shape, setShape] = useState("lanes");
	const tick = Math.floor(now * 4);
	const line = useMemo(() => lineOf(state), [tick, state.live]);
	const running = useMemo(() => runningOf(state), [tick, state.live]);
	const aside = html`<${Choice} label="Time shown" options=${SPANS} value=${span_s} onChange=${setSpan} />
		<${Choice} label="Shown as" options=${[["lanes", "Lanes"], ["table", "Table"]]} value=${shape} onChange=${setShape} />`;
	return html`<div class="view now">
		<${Summary} state=${state} now=${now} line=${line} running=${running} />
		${state.machines.length > 0 && html`<${Site} state=${state} now=${now} />`}
		<${Section} title="Slots" aside=${aside}>
			${state.slots.size || state.live.size
				? html`<${Lanes} ...${props} span_s=${span_s} as_table=${shape === "table"} /><${LaneLegend} />`
				: html`<p class="empty">No model is in memory: a request for one loads it.</p>`}
		<//>
		<div class="columns">
			<${Section} title="In slots" aside=${count(running.length)}><${Running} rows=${running} now=${now} /><//>
			<${Section} title="The line" aside=${count(line.length)}><${Line} rows=${line} now=${now} /><//>
		</div>
	</div>`;
}

/** The machines of a gate; what shows them comes with the first. */
function Site(props) {
	const [View, setView] = useState(null);
	useEffect(() => void import("./machines.js").then(({ Machines }) => setView(() => Machines)), []);
	return View && html`<${View} ...${props} />`;
}

function Summary({ state, now, line, running }) {
	const pace = paceOf(state, now);
	const memory = state.memory;
	const people = line.filter((row) => row.priority === "interactive" && row.kind !== "load").length;
	const engine = state.engine;
	return html`<p class="summary" role="status" aria-live="off">
		<span><b>${running.length}</b> in slots</span>
		<span><b>${line.length}</b> waiting${people ? ` (${people} interactive)` : ""}</span>
		<span><b>${rate(pace.tokens_per_second)}</b> tokens/s out</span>
		<span><b>${rate(pace.prompt_tokens_per_second)}</b> in</span>
		<span><b>${milliseconds(pace.step_ms)}</b> a step</span>
		${memory && html`<span>memory <b>${percent(memory.pressure_fraction)}</b> ${isGrave(memory.pressure) && html`<${Level} of=${memory.pressure} />`}</span>`}
		${isGrave(state.heat.level) && html`<span><${Level} of=${state.heat.level}>heat ${state.heat.level}<//></span>`}
		${!["serving", "unknown"].includes(engine.state) && html`<span><${Level} of=${engine.state}>engine ${engine.state}<//> ${whyOf(engine)}</span>`}
	</p>`;
}

function Running({ rows, now }) {
	const columns = [...COLUMNS, ["Now", "", (row) => html`<${StateMark} kind=${row.state} />${progress(row)}`], ["Since", "n", (row) => sinceWords(row, now)]];
	return html`<${Rows} label="Requests in slots" empty="No slot is in use." columns=${columns} rows=${rows} />`;
}

function Line({ rows, now }) {
	const columns = [
		["#", "n", (row) => (row.position != null ? row.position + 1 : "")],
		...COLUMNS,
		["Waits for", "", waitCell],
		["Its turn", "n", turn],
		["Waits", "n wide", (row) => sinceWords(row, now)],
	];
	return html`<${Rows} label="The line" empty="Nobody waits." columns=${columns} rows=${rows} />`;
}

function Rows({ label, empty, columns, rows }) {
	if (!rows.length) return html`<p class="empty">${empty}</p>`;
	return html`<div class="list"><${Table} label=${label} columns=${columns} rows=${rows.slice(0, MAX_ROWS)} keyOf=${(row) => row.request_id} /></div>
		${rows.length > MAX_ROWS && html`<p class="muted">and ${plural(rows.length - MAX_ROWS, "more request")}</p>`}`;
}

function sinceWords(row, now) {
	return duration(now - (row.moves.at(-1)?.at ?? row.arrived_at));
}

function waitCell(row) {
	return html`<i class="mark ${row.state}" aria-hidden="true"></i>${briefly(row.waits_for) || stateWords(row.state)}${row.stage && html` <small>${row.stage} ${percent(row.fraction)}</small>`}`;
}

function progress(row) {
	if (row.num_members) return html` <small>${count(row.num_done)} of ${count(row.num_members)}</small>`;
	if (row.state === "decode" && row.completion_tokens) return html` <small>${writtenWords(row)}</small>`;
	if (row.state !== "prefill" || !row.prompt_tokens) return null;
	const label = `${count(row.processed_tokens)} of ${count(row.prompt_tokens)} tokens`;
	return html` <${Meter} fraction=${row.processed_tokens / row.prompt_tokens} label=${label} /> <small>${label}</small>`;
}

function writtenWords(row) {
	const most = row.max_tokens ? ` of ${count(row.max_tokens)}` : "";
	return `${count(row.completion_tokens)}${most}${row.tokens_per_second ? `, ${rate(row.tokens_per_second)}/s` : ""}`;
}

function turn(row) {
	if (row.eta_s == null) return "";
	return row.eta_s < 0.5 ? "next" : `in ${duration(row.eta_s)}`;
}
