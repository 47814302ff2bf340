/** Values outside of components, and components that are drawn again when they change. */

import { useLayoutEffect, useReducer } from "../vendor/hooks.js";

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
