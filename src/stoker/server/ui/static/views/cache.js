/** Stored prefixes: what they saved, where they lie, and the tree that they form. */

import { html, useMemo } from "../dom.js";
import { cacheTree } from "../state/selectors.js";
import { bytes, count, duration, percent, plural, rate } from "../state/words.js";
import { Chart, useSpan } from "./chart.js";
import { ClassBadge, Figures, Level, Meter, RequestLink, Section, Table } from "./parts.js";

const HITS = [{ label: "last minute", colour: "--accent", fill: true, of: (bucket) => bucket.hit_rate }];
const SAVED = [
	{ label: "asked", colour: "--line-7", dash: "dashed", of: (bucket, step_s) => bucket.queries / step_s },
	{ label: "saved", colour: "--good", fill: true, of: (bucket, step_s) => bucket.hits / step_s },
];
const HELD = [
	{ label: "memory", colour: "--line-1", of: (bucket) => bucket.ram_bytes },
	{ label: "disk", colour: "--line-5", dash: "dashed", of: (bucket) => bucket.disk_bytes },
];
const WHERE = { junction: "shared part", ram: "memory", disk: "disk", pending: "being stored", reading: "from disk" };

export function View({ state, now, may }) {
	const cache = state.cache;
	const [span, spans] = useSpan();
	const tree = useMemo(() => cacheTree(cache), [cache]);
	if (!cache) return html`<div class="view"><p class="empty">Nothing is known of stored prefixes yet.</p></div>`;
	const most = Math.max(1, ...tree.map((each) => each.prefix.num_tokens));
	const stored = tree.filter((each) => each.prefix.where !== "junction");
	const chart = { state, now, span };
	return html`<div class="view cache">
		<${Section} title="What it saves" aside=${spans}>
			<${Figures} class="wide" of=${figures(cache)} />
			<div class="charts">
				<${Chart} ...${chart} title="Prompt tokens that were stored" lines=${HITS} words=${percent} top=${1} />
				<${Chart} ...${chart} title="Prompt tokens a second" lines=${SAVED} words=${rate} />
				<${Chart} ...${chart} title="Held" lines=${HELD} words=${bytes} base=${1024} />
			</div>
		<//>
		<${Section} title="Stored prefixes" aside=${`${count(cache.entries ?? stored.length)}${stored.length ? `, the ${count(stored.length)} longest shown` : ""}`}>
			${tree.length
				? html`<${Tree} tree=${tree} most=${most} />`
				: html`<p class="empty">${may.administrate ? "Nothing is stored yet." : "Which prefixes are stored is told to operators."}</p>`}
		<//>
	</div>`;
}

function figures(cache) {
	const { ram = {}, disk = {}, live = {} } = cache;
	const total = cache.queries_total ? cache.hits_total / cache.queries_total : null;
	const tier = (name, { bytes: held, limit, entries }) =>
		limit
			? [name, html`${bytes(held)} <${Meter} fraction=${held / limit} label="${name}: part of its limit" />`, `of ${bytes(limit)}, ${plural(entries ?? 0, "prefix")}`]
			: [name, "off"];
	return [
		["Last minute", percent(cache.hit_rate), "of prompt tokens not computed"],
		["Since its start", percent(total), `${count(cache.hits_total)} of ${count(cache.queries_total)} tokens saved`],
		tier("Memory", ram),
		tier("Disk", disk),
		live.cells_total && ["Cells", html`${percent(live.cells_used / live.cells_total)} <${Meter} fraction=${live.cells_used / live.cells_total} label="Cells in use" />`, `${count(live.cells_used)} of ${count(live.cells_total)}`],
		disk.problem && ["Disk is not used", html`<${Level} level="bad">${disk.problem}<//>`],
	];
}

function Tree({ tree, most }) {
	const stored = (words) => ({ prefix }) => (prefix.where === "junction" ? "" : words(prefix));
	const columns = [
		["Prefix", "", (each) => html`<${Branch} ...${each} most=${most} />`],
		["Tokens", "n", ({ prefix }) => count(prefix.num_tokens)],
		["Its own", "n wide", ({ prefix }) => count(prefix.own_tokens)],
		["Hits", "n", stored((prefix) => count(prefix.num_hits))],
		["Where", "nowrap", ({ prefix }) => WHERE[prefix.where] ?? prefix.where],
		["Bytes", "n wide", stored((prefix) => bytes(prefix.ram_bytes || prefix.disk_bytes))],
		["Last used", "n", stored((prefix) => duration(prefix.idle_s))],
		["Shared by", "id wide", ({ prefix }) => prefix.namespace || "all"],
		["In use by", "wide", ({ prefix }) => (prefix.used_by ?? []).map((id) => html`<${RequestLink} key=${id} id=${id} /> `)],
	];
	const name = ({ prefix }) => (prefix.where === "junction" ? "muted" : "");
	return html`<${Table} label="The tree of stored prefixes" columns=${columns} rows=${tree} keyOf=${({ prefix }) => prefix.id} nameOf=${name} />`;
}

function Branch({ prefix, depth, num_children, most }) {
	return html`<span class="branch" style=${{ paddingLeft: `${Math.min(depth, 10) * 14}px` }}>
		<span class="sr-only">level ${depth + 1}: </span><span class="twig" aria-hidden="true">${depth ? "└" : num_children ? "┬" : "·"}</span>
		<span class="length" aria-hidden="true"><i style=${{ width: `${(prefix.num_tokens / most) * 100}%` }}></i></span>
		<span class="wide">${prefix.model || fileName(prefix.source)}</span>
		${prefix.is_background && html`<${ClassBadge} priority="background" short />`}
	</span>`;
}

function fileName(path) {
	return String(path ?? "").split(/[\\/]/).at(-1);
}
