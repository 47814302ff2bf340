/** Small parts that several views are made of. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../dom.js";
import { open } from "../shell/place.js";
import { briefly, clockTime, levelOf, stateWords } from "../state/words.js";

export const classOf = (row) => (row.priority === "background" ? "background" : "interactive");

/** The class of a request: a filled or hollow square and its name. */
export function ClassBadge({ priority, short = false }) {
	const name = classOf({ priority });
	return html`<span class="klass ${name}" title=${name}>${short ? html`<span class="sr-only">${name}</span>` : name}</span>`;
}

/** A state in words, with the mark that its segments have in the lanes. */
export function StateMark({ kind }) {
	return html`<span class="state"><i class="mark ${kind}" aria-hidden="true"></i>${stateWords(kind)}</span>`;
}

/** A level (good, warn or bad; else that of the state `of`), never by colour alone: the text says it. */
export function Level({ of, level = levelOf(of), children = of }) {
	return html`<span class="level ${level}">${children}</span>`;
}

/** Names and figures; null entries are left out. */
export function Figures({ of, class: name = "" }) {
	return html`<dl class="facts ${name}">
		${of.filter(Boolean).map(
			([label, figure, note]) => html`<div key=${label}><dt>${label}</dt><dd>${figure}${note && html`<small>${note}</small>`}</dd></div>`,
		)}
	</dl>`;
}

/** The way to a request's story. */
export function RequestLink({ id }) {
	if (!id) return html`<span class="muted">another caller's</span>`;
	return html`<button class="link id" title=${id} onClick=${() => open(id)}>${briefly(id)}</button>`;
}

/** A button that does something once, and waits for it. */
export function ActButton({ act, children, danger = false, disabled = false, title }) {
	const [isBusy, setBusy] = useState(false);
	const isThere = useRef(true);
	useEffect(() => () => (isThere.current = false), []);
	const press = () => {
		if (isBusy) return;
		setBusy(true);
		const over = () => isThere.current && setBusy(false);
		act().then(over, over); // what went wrong is told by the shell
	};
	return html`<button class="act ${danger ? "danger" : ""}" title=${title} disabled=${disabled} aria-disabled=${isBusy} aria-busy=${isBusy} onClick=${press}>${children}</button>`;
}

/** A choice of few: `options` are [value, label]. */
export function Choice({ label, options, value, onChange }) {
	return html`<div class="pick" role="group" aria-label=${label}>
		${options.map(
			([each, text]) => html`<button key=${each} type="button" aria-pressed=${each === value} onClick=${() => onChange(each)}>${text}</button>`,
		)}
	</div>`;
}

/** A part of a view with its heading and what stands beside it. */
export function Section({ title, aside, children }) {
	const id = `s-${title.toLowerCase().replaceAll(" ", "-")}`;
	return html`<section class="part" aria-labelledby=${id}>
		<header><h2 id=${id}>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>
		${children}
	</section>`;
}

/** Rows and columns: a column is [title, classes, cell of a row]; false ones are left out. */
export function Table({ label, columns, rows, keyOf, nameOf = () => "" }) {
	const shown = columns.filter(Boolean);
	return html`<div class="scroll" tabindex="0" role="group" aria-label=${label}><table>
		<thead><tr>${shown.map(([title, name]) => html`<th class=${name}>${title}</th>`)}</tr></thead>
		<tbody>${rows.map((row) => html`<tr key=${keyOf(row)} class=${nameOf(row)}>${shown.map(([, name, cell]) => html`<td class=${name}>${cell(row)}</td>`)}</tr>`)}</tbody>
	</table></div>`;
}

/** A bar from 0 to 1 with its figures as text beside it. */
export function Meter({ fraction, label }) {
	const now = Math.round(Math.max(0, Math.min(1, fraction || 0)) * 100);
	return html`<span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${now}>
		<i style=${{ width: `${now}%` }}></i>
	</span>`;
}

/** Where a segment stands within its whole, as a style. */
export function inside(segment, { from, to }) {
	const part = 100 / (to - from || 1);
	return { left: `${(segment.from - from) * part}%`, width: `${(segment.to - segment.from) * part}%` };
}

/** The size of an element in pixels, and the ref that it is measured by. */
export function useSize(side = "clientWidth", first = 900) {
	const ref = useRef(null);
	const [size, setSize] = useState(first);
	useLayoutEffect(() => {
		const measure = () => setSize(Math.max(80, ref.current[side]));
		measure();
		const observer = new ResizeObserver(measure);
		observer.observe(ref.current);
		return () => observer.disconnect();
	}, []);
	return [ref, size];
}

/** What happened to the machine, the newest first. */
export function Notices({ notices, kinds, empty }) {
	const shown = notices.filter((each) => !kinds || kinds.includes(each.kind)).slice(-40).reverse();
	if (!shown.length) return html`<p class="empty">${empty}</p>`;
	return html`<ol class="notices" tabindex="0" aria-label="What happened, the newest first">
		${shown.map(
			(each) => html`<li class=${each.level}><time>${clockTime(each.at)}</time><span>${briefly(each.text)}</span></li>`,
		)}
	</ol>`;
}
