/**
 * A state that is being made from another one: each collection is copied before its first change, so that the
 * old state stays as it was, and once however many documents are applied.
 */
export class Draft {
	constructor(state) {
		this.state = { ...state };
		this.owned = new Set();
	}

	map(name) {
		if (!this.owned.has(name)) this.own(name, new Map(this.state[name]));
		return this.state[name];
	}

	list(name) {
		if (!this.owned.has(name)) this.own(name, this.state[name].slice());
		return this.state[name];
	}

	own(name, value) {
		this.owned.add(name);
		this.state[name] = value;
	}

	/** Append to a list, and drop its oldest entries past `most`. */
	append(name, entry, most) {
		const list = this.list(name);
		list.push(entry);
		if (list.length > most) list.splice(0, list.length - most);
	}
}

const known = new Map();
const MAX_KNOWN = 4096;

/** The same text as one object: thousands of moves have the same few reasons. */
export function interned(text) {
	if (typeof text !== "string") return text;
	const found = known.get(text);
	if (found !== undefined) return found;
	if (known.size >= MAX_KNOWN) known.clear();
	known.set(text, text);
	return text;
}
