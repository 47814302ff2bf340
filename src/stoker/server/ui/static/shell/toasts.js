/** Short notes at the edge: what went wrong stays until it is put away, what went well goes by itself. */

import { follow, html, signal } from "../dom.js";

const MAX_TOASTS = 4;
const SHOWN_MS = 6000;

const toasts = signal([]);
let number = 0;

/** Show a note; kind: good or bad. */
export function toast(kind, text, code = "") {
	const one = { id: ++number, kind, text, code };
	const same = toasts.value.filter((each) => each.text !== text || each.kind !== kind);
	toasts.value = [...same, one].slice(-MAX_TOASTS);
	if (kind !== "bad") setTimeout(() => close(one.id), SHOWN_MS);
}

const close = (id) => (toasts.value = toasts.value.filter((each) => each.id !== id));

/** Whether one was there to put away. */
export function close_newest() {
	const newest = toasts.value.at(-1);
	if (newest) close(newest.id);
	return Boolean(newest);
}

export function Toasts() {
	follow(toasts);
	return html`<div class="toasts" role="region" aria-label="Notes" aria-live="polite">
		${toasts.value.map(
			(one) => html`<div key=${one.id} class="toast ${one.kind}" role=${one.kind === "bad" ? "alert" : "status"}>
				<p>${one.text}${one.code && html` <code>${one.code}</code>`}</p>
				<button class="plain" aria-label="Put this note away" onClick=${() => close(one.id)}>×</button>
			</div>`,
		)}
	</div>`;
}
