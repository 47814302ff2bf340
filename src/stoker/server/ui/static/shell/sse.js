/**
 * Server-sent events out of a stream of text. Pure: text in, events out.
 *
 * EventSource cannot send a key, so the page reads the stream itself.
 */

/** Longest event in characters; a stream that sends a longer one is none of ours. */
const MAX_EVENT_CHARS = 16 * 2 ** 20;

export class SseParser {
	constructor() {
		this.rest = "";
	}

	/** The events that end in this piece: [{event, id, data}]; comments and empty ones are none. */
	push(text) {
		const whole = this.rest + text.replaceAll("\r", "");
		const events = [];
		let from = 0;
		for (let end; (end = whole.indexOf("\n\n", from)) >= 0; ) {
			const found = parsed(whole.slice(from, end));
			if (found.data !== null) events.push(found);
			from = end + 2;
		}
		this.rest = whole.slice(from);
		if (this.rest.length > MAX_EVENT_CHARS) throw new Error("an event of the stream is longer than 16 MiB");
		return events;
	}
}

function parsed(block) {
	const found = { event: "message", id: null, data: null };
	for (const line of block.split("\n")) {
		const colon = line.indexOf(":");
		if (colon <= 0) continue;
		const name = line.slice(0, colon);
		const value = line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
		if (name === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
		else if (name === "id" || name === "event") found[name] = value;
	}
	return found;
}
