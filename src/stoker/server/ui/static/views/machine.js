/** The machine: its pace, what its steps cost, how warm it is, and how its engine fared. */

import { html, useState } from "../dom.js";
import { actions } from "../shell/api.js";
import { clockTime, count, duration, milliseconds, plural, rate, whyOf } from "../state/words.js";
import { Chart, useSpan } from "./chart.js";
import { ActButton, Figures, Level, Notices, Section, Table } from "./parts.js";

const OUT = [{ label: "out", colour: "--interactive", fill: true, of: (bucket, step_s) => bucket.tokens / step_s }];
const IN = [{ label: "in", colour: "--line-3", fill: true, of: (bucket, step_s) => bucket.prompt_tokens / step_s }];
const STEPS = [
	{ label: "mean", colour: "--accent", of: (bucket) => (bucket.num_steps ? bucket.steps_ms / bucket.num_steps : null) },
	{ label: "longest", colour: "--line-5", dash: "dotted", of: (bucket) => (bucket.num_steps ? bucket.longest_ms : null) },
	{ label: "target", colour: "--warn", dash: "dashed", of: (bucket) => bucket.target_ms },
];
const HEAT = [{ label: "sensor", colour: "--bad", of: (bucket) => bucket.celsius }];
const degrees = (celsius) => (celsius == null ? "–" : `${Math.round(celsius)} °C`);

export function View({ state, now, may }) {
	const [span, spans] = useSpan();
	const chart = { state, now, span };
	return html`<div class="view machine">
		<${Section} title="Engine" aside=${may.administrate && html`<${Power} engine=${state.engine} />`}>
			<${Figures} class="wide" of=${engineFigures(state, now)} />
		<//>
		<${Section} title="Pace" aside=${spans}>
			<div class="charts">
				<${Chart} ...${chart} title="Tokens written a second" lines=${OUT} words=${rate} />
				<${Chart} ...${chart} title="Prompt tokens a second" lines=${IN} words=${rate} />
				<${Chart} ...${chart} title="Milliseconds a step" lines=${STEPS} words=${milliseconds} />
				${state.heat.celsius != null && html`<${Chart} ...${chart} title="Heat" lines=${HEAT} words=${degrees} top=${80} />`}
			</div>
		<//>
		<${Section} title="Steps of each model"><${Steps} state=${state} now=${now} /><//>
		<div class="columns">
			<${Section} title="Engines that ended"><${Exits} exits=${state.exits} /><//>
			<${Section} title="What happened"><${Notices} notices=${state.notices} empty="Nothing since the page was opened." /><//>
		</div>
	</div>`;
}

function engineFigures(state, now) {
	const { engine, heat } = state;
	const last = [...state.steps.values()].reduce((best, each) => (!best || each.at > best.at ? each : best), null);
	const threads = last?.threads ?? engine.threads;
	return [
		["State", html`<${Level} of=${engine.state} />`, whyOf(engine) || (engine.since && `for ${duration(now - engine.since)}`)],
		engine.label && ["Computes on", engine.label],
		["Restarts", count(engine.restarts ?? 0), "of the engine that nobody asked for"],
		threads > 0 && ["Threads", count(threads), last?.threads_reason || engine.threads_reason || "as many as set"],
		["Heat", html`<${Level} of=${heat.level} />`, [heat.sensor, heat.celsius != null && degrees(heat.celsius)].filter(Boolean).join(", ")],
		engine.pid && ["Process", engine.pid, state.version && `Stoker ${state.version}`],
		state.num_lost > 0 && ["Not read in time", plural(state.num_lost, "event")],
	];
}

/** A suspended program keeps its requests; others wait meanwhile, so that is asked once more. */
function Power({ engine }) {
	const [is_sure, setSure] = useState(false);
	if (engine.state === "suspended") return html`<${ActButton} act=${() => actions.wake()}>Wake up<//>`;
	if (!is_sure) return html`<${ActButton} disabled=${engine.state !== "serving"} act=${() => Promise.resolve(setSure(true))} title="Ends the engine and keeps every request">Suspend<//>`;
	const suspend = () => actions.suspend().finally(() => setSure(false));
	return html`<span>Requests wait until it wakes up.</span> <${ActButton} danger act=${suspend}>Suspend now<//> <button class="act" onClick=${() => setSure(false)}>Leave it</button>`;
}

function Steps({ state, now }) {
	const rows = [...state.steps.values()];
	if (!rows.length) return html`<p class="empty">No step has been made yet.</p>`;
	const isIdle = (each) => !each.num_steps || now - each.at > 5;
	const busy = (words) => (each) => (isIdle(each) ? "–" : words(each));
	const perSecond = (name) => busy((each) => rate(each[name] / each.span_s));
	const slow = (each) => (each.target_ms && each.step_ms > 1.5 * each.target_ms ? "warn" : "");
	const columns = [
		["Model", "", (each) => html`<b>${each.model}</b>${isIdle(each) && html` <small>idle</small>`}`],
		["A step", "n", busy((each) => html`<${Level} level=${slow(each)}>${milliseconds(each.step_ms)}<//>`)],
		["Longest", "n wide", busy((each) => milliseconds(each.longest_ms))],
		["Target", "n", (each) => milliseconds(each.target_ms)],
		["Rows", "n wide", busy((each) => each.rows?.toFixed(1))],
		["Tokens/s out", "n", perSecond("tokens")],
		["In", "n", perSecond("prompt_tokens")],
		["Reading", "n wide", (each) => count(each.num_prefill ?? 0)],
		["Writing", "n wide", (each) => count(each.num_decode ?? 0)],
	];
	return html`<${Table} label="Steps of each model" columns=${columns} rows=${rows} keyOf=${(each) => each.model} />`;
}

function Exits({ exits }) {
	if (!exits.length) return html`<p class="empty">None ended by itself.</p>`;
	return html`<ol class="exits">
		${exits.toReversed().map((each) => html`<li key=${each.at}>
			<time>${clockTime(each.at)}</time>
			<span>${each.reason || "no reason is known"} <small>after ${duration(each.served_s)}; ${plural(each.num_survived, "request")} went on${each.num_failed ? `, ${count(each.num_failed)} ended with it` : ""}${each.next_start_s > 0 && `; the next engine after ${duration(each.next_start_s)}`}</small></span>
		</li>`)}
	</ol>`;
}
