/** Small texts that the browser keeps, or the page where that is forbidden. */

const memory = new Map();

const slot = (store) => (name) => {
	const key = `stoker.${name}`;
	return {
		get() {
			try {
				return store().getItem(key);
			} catch {
				return memory.get(key) ?? null;
			}
		},
		/** Keep a text; null: none. */
		set(text) {
			try {
				if (text == null) store().removeItem(key);
				else store().setItem(key, text);
			} catch {
				memory.set(key, text);
			}
		},
	};
};

/** Until the tab is closed: the key, the conversation. */
export const forTab = slot(() => sessionStorage);

/** For good: the theme. */
export const forGood = slot(() => localStorage);
