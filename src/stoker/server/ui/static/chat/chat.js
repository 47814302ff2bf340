/** The tab Chat: a conversation with a model of this server. */

import { follow, html, useEffect, useRef, useState } from "../dom.js";
import { document_of, key } from "../shell/api.js";
import { line, replay } from "../shell/feed.js";
import { toast } from "../shell/toasts.js";
import { Choice as Pick } from "../views/parts.js";
import * as talk from "./conversation.js";
import { Message } from "./message.js";

const MAX_IMAGES = 4;
const MAX_IMAGE_BYTES = 8 * 2 ** 20;
const CLASSES = ["interactive", "background"].map((name) => [name, name]);

const set = (name) => (event) => talk.set_option(name, event.target.value);

function useModels() {
	follow(line);
	const [models, set_models] = useState(null);
	const is_live = line.value.state === "live";
	useEffect(() => {
		if (!is_live || replay.value) return;
		const talks = (one) => one.meta.has_chat_template && !one.meta.pooling;
		document_of("GET", "/v1/models").then((found) => set_models(found.data.filter(talks)), toast);
	}, [is_live, key.get()]);
	return models;
}

function Choice({ models }) {
	follow(talk.options, talk.messages);
	const { model, priority } = talk.options.value;
	return html`<div class="choice">
		<label>Model
			<select value=${model || models[0]?.id} onChange=${set("model")}>
				${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
			</select>
		</label>
		<${Pick} label="Class" options=${CLASSES} value=${priority} onChange=${(name) => talk.set_option("priority", name)} />
		<button class="plain" disabled=${!talk.messages.value.length} onClick=${talk.clear}>New conversation</button>
	</div>`;
}

const field = (name, label, more) => html`<label>${label}
	<input value=${talk.options.value[name]} ...${more} onInput=${set(name)} />
</label>`;

function Options() {
	follow(talk.options);
	const { system, tools } = talk.options.value;
	let problem = "";
	try {
		talk.tools_of(tools);
	} catch (error) {
		problem = `no JSON: ${error.message}`;
	}
	return html`<details class="options">
		<summary>System message, tools, sampling</summary>
		<label>System message
			<textarea rows="2" value=${system} onInput=${set("system")}></textarea>
		</label>
		<label>Tools: a list of functions with name, description and parameters, as JSON; they are shown when called, and not run
			<textarea rows="3" spellcheck="false" value=${tools} aria-invalid=${Boolean(problem)}
				onInput=${set("tools")}></textarea>
		</label>
		${problem && html`<p class="failed">${problem}</p>`}
		<div class="row">
			${field("temperature", "Temperature", { type: "number", min: 0, max: 5, step: 0.1, placeholder: "the model's" })}
			${field("max_tokens", "Tokens at most", { type: "number", min: 1, step: 1, placeholder: "the server's" })}
		</div>
	</details>`;
}

/** The images among files as data URLs; throws an Error that says which is too much. */
async function read_images(files, num_there) {
	const images = [...files].filter((one) => one.type.startsWith("image/"));
	if (!images.length) return [];
	if (num_there + images.length > MAX_IMAGES) throw new Error(`${MAX_IMAGES} images at most`);
	for (const one of images) {
		if (one.size > MAX_IMAGE_BYTES) throw new Error(`${one.name || "the image"} is larger than 8 MiB`);
	}
	return Promise.all(images.map(data_url));
}

function data_url(file) {
	return new Promise((resolve, reject) => {
		const reader = new FileReader();
		reader.onload = () => resolve(reader.result);
		reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
		reader.readAsDataURL(file);
	});
}

function Composer({ sees }) {
	follow(talk.running, talk.messages);
	const [text, set_text] = useState("");
	const [images, set_images] = useState([]);
	const input = useRef(null);
	const running = talk.running.value;
	const last = talk.messages.value.at(-1);
	const add = async (files) => {
		try {
			set_images([...images, ...(await read_images(files, images.length))]);
		} catch (error) {
			toast(error);
		}
	};
	const give_back = (said) => {
		set_text(said.content);
		set_images(said.images ?? []);
	};
	const send = async (event) => {
		event?.preventDefault();
		if (running || !(text.trim() || images.length)) return;
		set_text("");
		set_images([]);
		input.current.focus();
		if ((await talk.say(text, images)) && input.current?.value === "") give_back({ content: text, images });
	};
	const edit = () => {
		give_back(talk.take_back());
		input.current.focus();
	};
	const pressed = (event) => {
		if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
		if (event.key === "Escape" && running) running.stop();
	};
	return html`<form class="composer" onSubmit=${send}>
		${images.length > 0 &&
		html`<ul class="images" aria-label="Images to send">
			${images.map(
				(url, index) => html`<li key=${index}>
					<img src=${url} alt="Image ${index + 1}" />
					<button type="button" class="plain" aria-label="Leave image ${index + 1} out" onClick=${() => set_images(images.filter((_, at) => at !== index))}>×</button>
				</li>`,
			)}
		</ul>`}
		<label class="sr-only" for="say">Message</label>
		<textarea id="say" ref=${input} rows="3" placeholder="Say something. Enter sends, Shift+Enter begins a new line." value=${text}
			onInput=${(event) => set_text(event.target.value)} onKeyDown=${pressed} onPaste=${(event) => add(event.clipboardData.files)}></textarea>
		<div class="row">
			${running
				? html`<button type="button" class="danger" onClick=${running.stop}>Stop</button>`
				: html`<button type="submit" disabled=${!(text.trim() || images.length)}>Send</button>`}
			${!running &&
			last &&
			html`<button type="button" class="plain" onClick=${talk.again}>Write it again</button>
				<button type="button" class="plain" onClick=${edit}>Change what I said</button>`}
			${sees &&
			html`<label class="file">Add images
				<input type="file" accept="image/*" multiple onChange=${(event) => add(event.target.files).then(() => (event.target.value = ""))} />
			</label>`}
		</div>
	</form>`;
}

/** Keep the end in sight for as long as the reader is there. */
function useEndInSight(end, messages) {
	const is_there = useRef(true);
	useEffect(() => {
		const seen = new IntersectionObserver(([one]) => (is_there.current = one.isIntersecting), { rootMargin: "0px 0px 160px 0px" });
		seen.observe(end.current);
		return () => seen.disconnect();
	}, []);
	useEffect(() => {
		if (is_there.current) end.current.scrollIntoView({ block: "end" });
	}, [messages]);
}

function Conversation() {
	follow(talk.messages, talk.running);
	const messages = talk.messages.value;
	const end = useRef(null);
	useEndInSight(end, messages);
	const is_running = Boolean(talk.running.value);
	const last = talk.taken(messages).at(-1);
	return html`<div class="conversation" role="log" aria-label="Conversation" aria-live="off">
		${messages.map((one, index) => {
			const is_last = one === last;
			return html`<${Message} key=${index} message=${one} is_last=${is_last} is_running=${is_last && is_running} />`;
		})}
		${messages.length === 0 && html`<p class="empty">Nothing was said yet. The conversation stays in this tab until you close it.</p>`}
		<div ref=${end} class="end"></div>
	</div>`;
}

export function View() {
	follow(replay, talk.options);
	const models = useModels();
	useEffect(talk.forget_of_others, [key.get()]);
	if (replay.value) return html`<p class="empty">This is a recording: there is nobody to talk to.</p>`;
	if (!models) return html`<p class="empty">${line.value.state === "refused" ? line.value.error.message : "Loading"}</p>`;
	if (!models.length) return html`<p class="empty">This server has no model that this key may talk to.</p>`;
	const model = models.find((one) => one.id === talk.options.value.model) ?? models[0];
	return html`<section class="chat" aria-label="Chat">
		<${Choice} models=${models} /><${Options} />
		<${Conversation} />
		<${Composer} sees=${model.meta.pictures === "ready"} />
	</section>`;
}
