/** The conversation of this tab, bounded, and what may be done with it. */

import { signal } from "../dom.js";
import { ApiError, ask, key } from "../shell/api.js";
import { SseParser } from "../shell/sse.js";
import { forTab } from "../shell/storage.js";

const MAX_MESSAGES = 200;
const MAX_STORED_CHARS = 1_500_000; // a browser keeps about five million
const SHOWN_MS = 60;
const stored = forTab("chat");
const DEFAULTS = { model: "", priority: "interactive", system: "", tools: "", temperature: "", max_tokens: "" };

function restored() {
	try {
		const found = JSON.parse(stored.get());
		return { messages: found.messages ?? [], options: { ...DEFAULTS, ...found.options } };
	} catch {
		return { messages: [], options: DEFAULTS };
	}
}

const before = restored();
export const messages = signal(before.messages);
export const options = signal(before.options);
/** The request that writes now: {stop}; null: none. */
export const running = signal(null);

function keep() {
	let kept = messages.value.slice(-MAX_MESSAGES);
	const text = () => JSON.stringify({ messages: kept, options: options.value });
	if (text().length > MAX_STORED_CHARS) kept = taken(kept).map((one) => (one.images ? { ...one, images: [] } : one));
	while (kept.length > 1 && text().length > MAX_STORED_CHARS) kept = kept.slice(Math.ceil(kept.length / 4));
	stored.set(text());
}

export function set_option(name, value) {
	options.value = { ...options.value, [name]: value };
	keep();
}

export function clear() {
	running.value?.stop();
	messages.value = [];
	keep();
}

/** The functions that the model may call; throws where the text is no list of them. */
export function tools_of(text) {
	if (!text.trim()) return [];
	const found = JSON.parse(text);
	const list = Array.isArray(found) ? found : [found];
	return list.map((one) => (one.type ? one : { type: "function", function: one }));
}

/** Without the turns that the server refused: they are shown, and sent no more. */
export function taken(list) {
	const kept = [];
	for (const one of list) {
		if (!one.refused) kept.push(one);
		else while (kept.length && kept.at(-1).role !== "assistant") kept.pop();
	}
	return kept;
}

function body_of(list) {
	const chosen = options.value;
	const head = chosen.system.trim() ? [{ role: "system", content: chosen.system }] : [];
	const tools = tools_of(chosen.tools);
	return {
		messages: [...head, ...sent(taken(list))],
		model: chosen.model || "default",
		priority: chosen.priority,
		...(chosen.temperature === "" ? {} : { temperature: Number(chosen.temperature) }),
		...(chosen.max_tokens === "" ? {} : { max_tokens: Number(chosen.max_tokens) }),
		...(tools.length ? { tools } : {}),
	};
}

/** True: the server refused it. */
export const say = (content, images) => answered([...messages.value, { role: "user", content, images }]);

/** Give the results of the calls of the last answer, and have it go on. */
export function give_results(results) {
	const calls = taken(messages.value).at(-1).calls;
	const given = calls.map((call, index) => ({ role: "tool", id: call.id, name: call.name, content: results[index] ?? "" }));
	return answered([...messages.value, ...given]);
}

export function again() {
	const list = messages.value;
	const last = list.findLastIndex((one) => one.role !== "assistant");
	return answered(list.slice(0, last + 1));
}

/** Take the last thing said back; its text. */
export function take_back() {
	const list = messages.value;
	const last = list.findLastIndex((one) => one.role === "user");
	const said = list[last];
	messages.value = list.slice(0, last);
	keep();
	return said;
}

async function answered(list) {
	if (running.value) return;
	const leaving = new AbortController();
	let answer = begun();
	let timer = 0;
	const show = () => {
		timer = 0;
		messages.value = [...list, answer];
	};
	running.value = { stop: () => leaving.abort() };
	show();
	try {
		const seen = (chunk) => {
			answer = followed(answer, chunk);
			timer ||= setTimeout(show, SHOWN_MS);
		};
		await asked(body_of(list), seen, leaving.signal);
		if (leaving.signal.aborted) answer = { ...answer, finish: "stopped" };
	} catch (error) {
		answer = { ...answer, refused: error.status >= 400 && error.status < 500, error: { code: error.code ?? "page", message: error.message } };
	}
	clearTimeout(timer);
	running.value = null;
	messages.value = [...list, { ...answer, progress: null }].slice(-MAX_MESSAGES);
	keep();
	return answer.refused;
}

/** Whose conversation it is: another key begins another one. */
let owner = key.get();
export function forget_of_others() {
	if (owner !== key.get()) clear();
	owner = key.get();
}

const begun = () => ({ role: "assistant", id: "", content: "", reasoning: "", calls: [], progress: null, usage: null, finish: null, error: null });

function followed(answer, chunk) {
	if (chunk.error) return { ...answer, error: { code: chunk.error.code, message: chunk.error.message } };
	const next = { ...answer, id: chunk.id ?? answer.id, usage: chunk.usage ?? answer.usage, progress: chunk.prompt_progress ?? answer.progress };
	const choice = chunk.choices?.[0];
	const delta = choice?.delta ?? {};
	if (delta.content) next.content = answer.content + delta.content;
	if (delta.reasoning_content) next.reasoning = answer.reasoning + delta.reasoning_content;
	if (delta.tool_calls) next.calls = merged(answer.calls, delta.tool_calls);
	if (delta.content || delta.reasoning_content || delta.tool_calls) next.progress = null;
	if (choice?.finish_reason) next.finish = choice.finish_reason;
	return next;
}

function merged(calls, deltas) {
	const next = calls.slice();
	for (const one of deltas) {
		const before = next[one.index] ?? { id: "", name: "", arguments: "" };
		next[one.index] = {
			id: one.id ?? before.id,
			name: one.function?.name ?? before.name,
			arguments: before.arguments + (one.function?.arguments ?? ""),
		};
	}
	return next;
}

/** The messages of a conversation as the API takes them. */
function sent(messages) {
	return messages.map((one) => {
		if (one.role === "tool") return { role: "tool", tool_call_id: one.id, content: one.content };
		if (one.role === "assistant") {
			const calls = one.calls?.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
			return { role: "assistant", content: one.content, ...(calls?.length ? { tool_calls: calls } : {}) };
		}
		if (!one.images?.length) return { role: one.role, content: one.content };
		const images = one.images.map((url) => ({ type: "image_url", image_url: { url } }));
		return { role: one.role, content: [...images, { type: "text", text: one.content }] };
	});
}

/** Ask; `seen(chunk)` is called with each chunk. Throws ApiError; ends quietly where `signal` stops it. */
async function asked(body, seen, signal) {
	const whole = { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
	try {
		const answer = await ask("POST", "/v1/chat/completions", { body: whole, signal });
		const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
		const parser = new SseParser();
		for (let read = await reader.read(); !read.done; read = await reader.read()) {
			for (const one of parser.push(read.value)) if (one.data !== "[DONE]") seen(JSON.parse(one.data));
		}
	} catch (error) {
		if (signal.aborted) return;
		throw error instanceof ApiError ? error : new ApiError("stream_lost", "the answer broke off: the connection was lost", 0);
	}
}
