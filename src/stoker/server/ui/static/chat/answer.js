/** One answer as it comes: the chunks of `/v1/chat/completions` put together. `followed` is pure. */

import { ApiError, ask } from "../shell/api.js";
import { SseParser } from "../shell/sse.js";

export const begun = () => ({ role: "assistant", id: "", content: "", reasoning: "", calls: [], progress: null, usage: null, finish: null, error: null });

export function followed(answer, chunk) {
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
export function sent(messages) {
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
export async function asked(body, seen, signal) {
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
