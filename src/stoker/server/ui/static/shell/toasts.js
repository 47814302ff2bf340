/** Short notes at the edge of what went wrong; each stays until it is put away. */

import { follow, html, signal } from "../dom.js";

const MAX_TOASTS = 4;

const toasts = signal([]);
let number = 0;

/** Tell what went wrong, and its code. */
export function toast({ message, code }) {
	const others = toasts.value.filter((each) => each.message !== message);
	toasts.value = [...others, { id: ++number, message, code }].slice(-MAX_TOASTS);
}

const close = (id) => (toasts.value = toasts.value.filter((each) => each.id !== id));

export const close_newest = () => close(toasts.value.at(-1)?.id);

export function Toasts() {
	follow(toasts);
	return html`<div class="toasts" role="region" aria-label="Notes">
		${toasts.value.map(
			({ id, message, code }) => html`<div key=${id} class="toast" role="alert">
				<p>${message}${code && html` <code>${code}</code>`}</p>
				<button class="plain" aria-label="Put this note away" onClick=${() => close(id)}>×</button>
			</div>`,
		)}
	</div>`;
}
