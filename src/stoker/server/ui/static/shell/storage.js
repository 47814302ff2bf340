/** Small texts that a browser keeps for this page; where it forbids that, they last as long as the page. */

const memory = new Map();

function slot(kind, name) {
	const key = `stoker.${name}`;
	const store = () => (kind === "session" ? sessionStorage : localStorage);
	return {
		get() {
			try {
				return store().getItem(key);
			} catch {
				return memory.get(key) ?? null;
			}
		},
		/** Whether it is kept. */
		set(text) {
			try {
				if (text == null) store().removeItem(key);
				else store().setItem(key, text);
				return true;
			} catch {
				memory.set(key, text);
				return false;
			}
		},
	};
}

/** Until the tab is closed: the key, the conversation. */
export const forTab = (name) => slot("session", name);

/** For good: the theme. */
export const forGood = (name) => slot("local", name);
