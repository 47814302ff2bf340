/** Requests that ended, the newest first: only the rows in sight are drawn. */

import { html, useLayoutEffect, useMemo, useState } from "../dom.js";
import { open } from "../shell/place.js";
import { briefly, clockTime, count, duration, endWords, plural, rate } from "../state/words.js";
import { Choice, ClassBadge, Level, useSize } from "./parts.js";

const ROW_PX = 28;
const BEYOND = 8; // rows drawn above and below those in sight
const CLASSES = [
	["", "All"],
	["interactive", "Interactive"],
	["background", "Background"],
];
const ENDS = [
	["", "Any end"],
	["good", "Ended well"],
	["bad", "Failed"],
	["moved", "Gave way or survived"],
];
const COLUMNS = [
	["Ended", "", (row) => clockTime(row.ended_at)],
	["Request", "id", (row) => briefly(row.request_id)],
	["Class", "", (row) => row.kind !== "load" && html`<${ClassBadge} priority=${row.priority} />`],
	["End", "", (row) => html`<${Level} level=${row.error ? "bad" : ""}>${endWords(row)}<//>${movedWords(row)}`],
	["End to end", "n", (row) => duration(row.end_to_end_s ?? row.ended_at - row.arrived_at)],
	["Kind", "wide", (row) => row.kind],
	["Model", "wide", (row) => row.model],
	["Queue", "n wide", (row) => duration(row.queue_s)],
	["First token", "n wide", (row) => duration(row.first_token_s)],
	["Prompt", "n wide", (row) => count(row.prompt_tokens)],
	["Stored", "n wide", (row) => (row.cached_tokens ? count(row.cached_tokens) : "")],
	["Written", "n wide", (row) => count(row.completion_tokens)],
	["Tokens/s", "n wide", (row) => (row.tokens_per_second == null ? "" : rate(row.tokens_per_second))],
];

export function View({ state }) {
	const [text, setText] = useState("");
	const [priority, setPriority] = useState("");
	const [end, setEnd] = useState("");
	const rows = useMemo(() => matching(state.ended, text.trim().toLowerCase(), priority, end), [state.ended, text, priority, end]);
	const dropped = state.num_ended - state.ended.length;
	return html`<div class="view history">
		<div class="toolbar">
			<input type="search" placeholder="Request, model, route …" aria-label="Find requests" value=${text} onInput=${(event) => setText(event.target.value)} />
			<${Choice} label="Class" options=${CLASSES} value=${priority} onChange=${setPriority} />
			<label class="sr-only" for="history-end">How it ended</label>
			<select id="history-end" value=${end} onChange=${(event) => setEnd(event.target.value)}>${ENDS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>
			<span class="muted" role="status">${plural(rows.length, "request")}${dropped > 0 ? `, ${count(dropped)} older ones dropped` : ""}</span>
		</div>
		${rows.length ? html`<${Rows} rows=${rows} />` : html`<p class="empty">${state.ended.length ? "None is like that." : "No request has ended yet."}</p>`}
	</div>`;
}

function movedWords(row) {
	const told = [row.num_parks > 0 && `parked ${row.num_parks}×`, row.num_restarts > 0 && plural(row.num_restarts, "restart")];
	const words = told.filter(Boolean).join(", ");
	return words && html` <small>${words}</small>`;
}

function matching(ended, text, priority, end) {
	const fits = (row) =>
		(!priority || row.priority === priority) &&
		(!end || endOf(row, end)) &&
		(!text || [row.request_id, row.model, row.route, row.kind].some((each) => each?.toLowerCase().includes(text)));
	return (text || priority || end ? ended.filter(fits) : ended).toReversed();
}

function endOf(row, end) {
	if (end === "moved") return row.num_parks > 0 || row.num_restarts > 0;
	const is_bad = Boolean(row.error) || row.finish_reason === "cancelled";
	return end === "bad" ? is_bad : !is_bad;
}

function Rows({ rows }) {
	const [box, height] = useSize("clientHeight");
	const [top, setTop] = useState(0);
	const [current, setCurrent] = useState(null); // by identity: newer rows come above it
	useLayoutEffect(() => keepPlace(box.current, rows), [rows]);
	const first = Math.max(0, Math.floor(top / ROW_PX) - BEYOND);
	const shown = rows.slice(first, Math.ceil((top + height) / ROW_PX) + BEYOND);
	const at = Math.max(0, rows.indexOf(current));
	const step = (event) => {
		const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + 15, PageUp: at - 15 }[event.key];
		if (event.key === "Enter") open(rows[at].request_id);
		if (to === undefined) return;
		event.preventDefault();
		const next = Math.max(0, Math.min(rows.length - 1, to));
		setCurrent(rows[next]);
		showRow(box.current, next);
	};
	return html`<div class="rows-box" role="table" aria-label="Requests that ended" aria-rowcount=${rows.length + 1}>
		<div class="rows-head" role="rowgroup"><div class="entry" role="row">${COLUMNS.map(([title, name]) => html`<span role="columnheader" class=${name === "id" ? "" : name}>${title}</span>`)}</div></div>
		<div class="rows" role="rowgroup" ref=${box} tabindex="0" aria-label="Arrow keys choose a row, Enter opens it" onScroll=${(event) => setTop(event.target.scrollTop)} onKeyDown=${step}>
			<div class="rows-all" style=${{ height: `${rows.length * ROW_PX}px` }}>
				${shown.map(
					(row, number) => html`<div key="${row.request_id}${row.arrived_at}" class="entry ${row === rows[at] ? "current" : ""}" role="row" aria-rowindex=${first + number + 2} style=${{ top: `${(first + number) * ROW_PX}px` }} onClick=${() => (setCurrent(row), open(row.request_id))}>
						${COLUMNS.map(([, name, cell]) => html`<span role="cell" class=${name}>${cell(row)}</span>`)}
					</div>`,
				)}
			</div>
		</div>
	</div>`;
}

function showRow(box, number) {
	const y = number * ROW_PX;
	if (y < box.scrollTop) box.scrollTop = y;
	else if (y + ROW_PX > box.scrollTop + box.clientHeight) box.scrollTop = y + ROW_PX - box.clientHeight;
}

/** Rows that come at the top do not move what somebody who has scrolled down reads. */
function keepPlace(box, rows) {
	const before = box.firstRow;
	box.firstRow = rows[0];
	if (!before || box.scrollTop < ROW_PX) return;
	const num_new = rows.indexOf(before);
	if (num_new > 0) box.scrollTop += num_new * ROW_PX;
}
