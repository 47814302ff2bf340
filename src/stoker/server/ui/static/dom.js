/** The one door to the libraries, and values outside of components: everything that draws imports from here. */

import { useLayoutEffect, useReducer } from "./vendor/hooks.js";
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export * from "./vendor/hooks.js";

export const html = htm.bind(h);

export function signal(first) {
	let value = first;
	const readers = new Set();
	return {
		get value() {
			return value;
		},
		set value(next) {
			if (next === value) return;
			value = next;
			for (const told of [...readers]) told();
		},
		/** Have `told` called at each change; gives what ends that. */
		follow(told) {
			readers.add(told);
			return () => readers.delete(told);
		},
	};
}

/** A hook: draw the component again when one of these changes. */
export function follow(...signals) {
	const [, redraw] = useReducer((count) => count + 1, 0);
	const seen = signals.map((one) => one.value);
	useLayoutEffect(() => {
		const stops = signals.map((one) => one.follow(redraw));
		if (signals.some((one, index) => one.value !== seen[index])) redraw(); // it changed since it was drawn
		return () => stops.forEach((stop) => stop());
	}, []);
}
