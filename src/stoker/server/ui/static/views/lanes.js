/**
 * The lanes: what each slot did in the last minutes. A bar is a stay of one request; on the siding below stands who
 * waits for the slot or has given it away.
 */

import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { open } from "../shell/place.js";
import { lanesOf } from "../state/lanes.js";
import { NO_SLOT } from "../state/moves.js";
import { briefly, clockTime, duration, plural, stateWords } from "../state/words.js";
import { layOut } from "./lane_layout.js";
import { ClassBadge, classOf, inside, RequestLink, StateMark, Table, useSize } from "./parts.js";

const MIN_BAR_PX = 3;
const LABEL_FROM_PX = 44;
const PARTS_AT_ONCE = 60;
const KINDS = ["queued", "prefix_wait", "prefill", "decode", "replayed", "parked", "paused", "held"];
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e6, 0], End: [1e6, 0] };

export function Lanes({ state, now, span_s, as_table }) {
	const [box, width] = useSize();
	const [focused, setFocused] = useState(null);
	const tick = Math.floor(now * 4); // four pictures a second, however often the state changes
	const found = useMemo(() => lanesOf(state, now, { span_s, min_s: (span_s / width) * MIN_BAR_PX }), [tick, width, span_s, state.num_documents === 0]);
	const laid = useMemo(() => layOut(found, width), [found]);
	const num = useSlices(laid.waits.length + laid.bars.length);
	const num_waits = Math.max(0, num - laid.bars.length);
	const area = useRef(null);
	const current = laid.bars.some((place) => keyOf(place.bar) === focused) ? focused : laid.bars.length ? keyOf(laid.bars.at(-1).bar) : null;
	const move = (event) => {
		const step = KEYS[event.key];
		const next = step && neighbour(laid.bars, current, step);
		if (!next) return;
		event.preventDefault();
		setFocused(keyOf(next.bar));
		requestAnimationFrame(() => area.current?.querySelector('[tabindex="0"]')?.focus());
	};
	return html`<div class="lanes">
		<div class="lane-names" aria-hidden="true">${names(laid)}</div>
		<div class="tracks" ref=${box}>
			${!as_table &&
			html`<div class="canvas" ref=${area} role="group" aria-label="Slots over the last minutes; arrow keys move between bars" style=${{ height: `${laid.height}px` }} onKeyDown=${move}>
				<${Backdrop} laid=${laid} width=${width} />
				<div class="moving" style=${{ transform: `translateX(-${laid.shift}px)` }}>
					${laid.outages.map((each) => html`<i class="outage" title=${each.reason || each.state} style=${{ left: `${each.x}px`, width: `${each.width}px` }}>${each.width > 70 && html`<span>${each.state}</span>`}</i>`)}
					${laid.waits.slice(0, num_waits).map((place) => html`<${Wait} key="${keyOf(place.wait)}w" place=${place} />`)}
					${num_waits >= laid.waits.length && html`<${Links} laid=${laid} />`}
					${laid.bars.slice(0, num).map((place) => html`<${Bar} key=${keyOf(place.bar)} place=${place} is_current=${keyOf(place.bar) === current} />`)}
				</div>
			</div>`}
			${as_table && html`<${LaneTable} found=${found} />`}
		</div>
	</div>`;
}

/** How many parts are drawn by now: some more with each frame, as all at once take too long. */
function useSlices(total) {
	const [num, setNum] = useState(PARTS_AT_ONCE);
	useEffect(() => {
		if (num >= total) return undefined;
		const frame = requestAnimationFrame(() => setNum(num + PARTS_AT_ONCE));
		return () => cancelAnimationFrame(frame);
	}, [num, total]);
	return num;
}

function keyOf(part) {
	return `${part.id}/${part.index}/${part.segments[0].from}/${part.row.model}`;
}

/** The bar beside the current one in its lane, or at the same time in another. */
function neighbour(bars, current, [across, down]) {
	const here = bars.find((place) => keyOf(place.bar) === current);
	if (!here) return null;
	if (across) {
		const lane = bars.filter((place) => place.lane === here.lane);
		const number = Math.min(lane.length - 1, Math.max(0, lane.indexOf(here) + across));
		return lane[number];
	}
	const rows = [...new Set(bars.map((place) => place.y))].sort((one, other) => one - other);
	const y = rows[rows.indexOf(here.y) + down];
	const middle = here.x + here.width / 2;
	const apart = (place) => Math.abs(place.x + place.width / 2 - middle);
	return bars.filter((place) => place.y === y).sort((one, other) => apart(one) - apart(other))[0] ?? null;
}

function names(laid) {
	return html`
		${laid.heads.map((head) => html`<b class="model-name" style=${{ top: `${head.y}px` }}>${head.title}</b>`)}
		${laid.lanes.map(
			(lane) => html`<span class="lane-name ${lane.is_line ? "line" : ""}" style=${{ top: `${lane.y}px`, height: `${lane.height}px` }}>
				${lane.is_line ? "line" : lane.slot === NO_SLOT ? html`no<span class="word"> slot</span>` : html`<span class="word">slot </span>${lane.slot}`}
			</span>`,
		)}`;
}

function Backdrop({ laid, width }) {
	return html`<div class="backdrop" aria-hidden="true">
		${laid.lanes.filter((lane) => !lane.is_line).map((lane) => html`<i class="track" style=${{ top: `${lane.y}px`, height: `${lane.height}px` }}></i>`)}
		${laid.lanes.filter((lane) => lane.num_hidden).map((lane) => html`<span class="more" style=${{ top: `${lane.y + (lane.is_line ? 0 : lane.height)}px` }}>+${lane.num_hidden}</span>`)}
		${laid.ticks.map((tick) => html`<i class="tick" style=${{ left: `${tick.x}px` }}><span class=${tick.x < 24 ? "first" : tick.x > width - 16 ? "last" : ""}>${tick.ago ? `−${ago(tick.ago)}` : "now"}</span></i>`)}
	</div>`;
}

function ago(seconds) {
	return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

function Bar({ place, is_current }) {
	const { bar, width } = place;
	const is_one = bar.num === 1;
	const text = is_one ? barWords(place) : `${plural(bar.num, "request")}, ${duration(bar.to - bar.from)} together`;
	const kind = is_one ? `${classOf(bar.row)} ${bar.is_open ? "open" : ""}` : "cluster";
	return html`<button class="bar ${kind}" tabindex=${is_current ? 0 : -1} style=${at(place)} title=${text} aria-label=${text} onClick=${() => open(bar.id)}>
		${is_one && bar.segments.map((each) => html`<i class="segment ${each.kind}" style=${inside(each, bar)}></i>`)}
		${is_one && width >= LABEL_FROM_PX && html`<span class="name">${briefly(bar.id)}${bar.index ? ` ·${bar.index + 1}` : ""}</span>`}
	</button>`;
}

const at = ({ x, y, width, height }) => ({ left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });

const laneWords = (key) => key.replace(`/${NO_SLOT}`, ", no slot").replace("/", " slot ");

function barWords({ bar, lane }) {
	return `${briefly(bar.id)}, ${bar.row.priority}, ${laneWords(lane)}: ${segmentWords(bar)}${bar.is_open ? ", still there" : ""}`;
}

function segmentWords(bar) {
	return bar.segments.map((each) => `${stateWords(each.kind)} ${duration(each.to - each.from)}`).join(", ");
}

function Wait({ place }) {
	const { wait } = place;
	const last = wait.segments.at(-1);
	const text = `${briefly(wait.id)} ${stateWords(last.kind)} ${duration(wait.to - wait.from)}${last.reason ? `: ${briefly(last.reason)}` : ""}`;
	return html`<div class="wait ${classOf(wait.row)}" style=${at(place)} title=${text} onClick=${() => open(wait.id)}>
		${wait.segments.map((each) => html`<i class="segment ${each.kind}" style=${inside(each, wait)}></i>`)}
	</div>`;
}

function Links({ laid }) {
	return html`<svg class="links" aria-hidden="true">
		${laid.links.map((link) => (link.kind === "handover" ? handover(link) : siding(link)))}
	</svg>`;
}

function siding({ kind, x, from, to, background }) {
	const name = background ? "background" : "interactive";
	const end = Math.sign(to - from);
	const head = kind === "in" ? `M${x - 3} ${to - end * 4} L${x} ${to} L${x + 3} ${to - end * 4}` : "";
	return html`<path class=${name} d="M${x} ${from} V${to} ${head}" />`;
}

/** An arc over the lane, or a line to another one, from who gave its slot to who got it. */
function handover({ x, to_x, from, to }) {
	const end = Math.max(to_x, x) + 7;
	if (from === to) {
		const top = from - 1;
		return html`<g class="handover"><path d="M${x - 7} ${top} C${x - 5} ${top - 8} ${end - 4} ${top - 8} ${end} ${top}" /><path class="tip" d="M${end - 5} ${top - 4} L${end + 0.5} ${top + 0.5} L${end + 1} ${top - 6} Z" /></g>`;
	}
	const start = to > from ? from + 24 : from;
	const stop = to > from ? to : to + 24;
	return html`<g class="handover"><path d="M${x} ${start} C${x} ${(start + stop) / 2} ${end} ${(start + stop) / 2} ${end} ${stop}" /></g>`;
}

/** The same as a table, for those who do not see it or want the figures. */
function LaneTable({ found }) {
	const bars = found.models.flatMap((model) => model.lanes.flatMap((lane) => lane.bars.map((bar) => ({ bar, lane }))));
	const shown = bars.sort((one, other) => other.bar.from - one.bar.from).slice(0, 200);
	if (!shown.length) return html`<p class="empty">Nothing has run in the last minutes.</p>`;
	const columns = [
		["Slot", "", ({ lane }) => laneWords(lane.key)],
		["Request", "", ({ bar }) => html`<${RequestLink} id=${bar.id} />${bar.num > 1 && ` and ${bar.num - 1} more`}`],
		["Class", "", ({ bar }) => html`<${ClassBadge} priority=${bar.row.priority} />`],
		["From", "", ({ bar }) => clockTime(bar.from)],
		["For", "n", ({ bar }) => duration(bar.to - bar.from)],
		["What", "", ({ bar }) => segmentWords(bar)],
	];
	return html`<${Table} label="Slots as a table" columns=${columns} rows=${shown} keyOf=${({ bar }) => keyOf(bar)} />`;
}

export function LaneLegend() {
	return html`<ul class="lane-legend" aria-label="What the bars mean">
		<li><${ClassBadge} priority="interactive" /></li>
		<li><${ClassBadge} priority="background" /></li>
		${KINDS.map((kind) => html`<li key=${kind}><${StateMark} kind=${kind} /></li>`)}
		<li><svg width="20" height="10" aria-hidden="true" class="links"><g class="handover"><path d="M2 9 C4 1 12 1 16 9" /><path class="tip" d="M11 5 L16.5 9.5 L17 3 Z" /></g></svg> gives its slot</li>
	</ul>`;
}
