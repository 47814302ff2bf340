/** One message of the conversation as it is shown. */

import { follow, html, useState } from "../dom.js";
import { state } from "../shell/feed.js";
import { open } from "../shell/place.js";
import { give_results } from "./conversation.js";
import { Markdown } from "./markdown.js";

const ENDS = { stopped: "stopped", length: "cut at its longest", tool_calls: "", stop: "" };

/** What a running answer waits for, in words; from the stream of events. */
function Waiting({ id, progress }) {
	follow(state);
	const row = state.value.live.get(id);
	if (progress?.total) {
		const cached = progress.cache ? `, ${progress.cache} from the cache` : "";
		return html`<p class="muted" role="status">reads the prompt: ${progress.processed} of ${progress.total} tokens${cached}</p>`;
	}
	const why = row?.waits_for || row?.moves?.at(-1)?.reason || "";
	return html`<p class="muted" role="status">${row ? `${row.state}${why ? `: ${why}` : ""}` : "waits"}</p>`;
}

function Calls({ calls, is_last }) {
	const [results, set_results] = useState([]);
	const give = (event) => {
		event.preventDefault();
		give_results(results);
	};
	return html`<form class="calls" onSubmit=${give}>
		${calls.map(
			(call, index) => html`<div class="call" key=${index}>
				<p><b>calls</b> <code>${call.name}</code></p>
				<pre tabindex="0"><code>${call.arguments}</code></pre>
				${is_last &&
				html`<label>Result, as nothing is run here
					<textarea rows="2" value=${results[index] ?? ""}
						onInput=${(event) => set_results(Object.assign([...results], { [index]: event.target.value }))}></textarea>
				</label>`}
			</div>`,
		)}
		${is_last && html`<button type="submit">Give the results</button>`}
	</form>`;
}

function Figures({ message }) {
	const { usage, finish, id } = message;
	const cached = usage?.prompt_tokens_details?.cached_tokens;
	const parts = [
		usage && `${usage.prompt_tokens} tokens in${cached ? ` (${cached} from the cache)` : ""}`,
		usage && `${usage.completion_tokens} out`,
		finish && (ENDS[finish] ?? finish),
	].filter(Boolean);
	return html`<p class="figures">
		${parts.join(" · ")} ${id && html`<button class="plain small" onClick=${() => open(id)}>Story</button>`}
	</p>`;
}

function Answer({ message, is_running, is_last }) {
	const is_silent = is_running && !message.content && !message.reasoning && !message.calls.length;
	return html`
		${message.reasoning &&
		html`<details class="thinking"><summary>${is_running && !message.content ? "Thinking" : "Thought"}</summary><${Markdown} text=${message.reasoning} /></details>`}
		${message.content && html`<${Markdown} text=${message.content} />`}
		${message.calls.length > 0 && html`<${Calls} calls=${message.calls} is_last=${is_last && !is_running} />`}
		${is_silent && html`<${Waiting} id=${message.id} progress=${message.progress} />`}
		${message.error && html`<p class="failed" role="alert">${message.refused && "Refused, and left out of what follows: "}${message.error.message} <code>${message.error.code}</code></p>`}
		${!is_running && html`<${Figures} message=${message} />`}
	`;
}

const WHO = { user: "You", assistant: "Answer", tool: "Result of a tool" };

export function Message({ message, is_running, is_last }) {
	const { role } = message;
	return html`<article class="message ${role}" aria-label=${WHO[role]} aria-busy=${is_running}>
		${role === "assistant"
			? html`<${Answer} message=${message} is_running=${is_running} is_last=${is_last} />`
			: html`${message.images?.map((url, index) => html`<img key=${index} src=${url} alt="Image ${index + 1}" />`)}
					<p class="said">${role === "tool" && html`<code>${message.name}</code> `}${message.content}</p>`}
	</article>`;
}
