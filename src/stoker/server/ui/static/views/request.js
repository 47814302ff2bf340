/** One request: how it is, what it took, and the story of every move it made. */

import { html, useEffect, useRef, useState } from "../dom.js";
import { actions, textOf } from "../shell/api.js";
import { open } from "../shell/place.js";
import { forTab } from "../shell/storage.js";
import { choicesOf } from "../state/moves.js";
import { endedAt } from "../state/requests.js";
import { requestOf } from "../state/selectors.js";
import { storyOf } from "../state/story.js";
import { briefly, clockTime, count, duration, endWords, milliseconds, percent, plural, rate, stateWords } from "../state/words.js";
import { ActButton, ClassBadge, classOf, Figures, inside, Level, RequestLink, StateMark } from "./parts.js";

const texts = forTab("texts");

export function RequestDrawer({ state, now, may, requestId }) {
	const box = useRef(null);
	useEffect(() => {
		const before = document.activeElement;
		box.current?.focus();
		return () => before?.isConnected && before.focus();
	}, [requestId]);
	const row = requestOf(state, requestId);
	const close = (event) => event.key === "Escape" && (event.preventDefault(), open(null));
	return html`<div class="drawer view" role="dialog" aria-labelledby="drawer-title" tabindex="-1" ref=${box} onKeyDown=${close}>
		<header>
			<h2 id="drawer-title"><span class="sr-only">Request </span><span class="id">${requestId}</span></h2>
			<button class="act close" aria-label="Close" title="Close (Esc)" onClick=${() => open(null)}>✕</button>
		</header>
		${row ? html`<${Story} row=${row} now=${now} may=${may} />` : html`<p class="empty">Nothing is known of it any more: the page keeps the last 10,000 that ended while it was open.</p>`}
	</div>`;
}

function Story({ row, now, may }) {
	const is_live = row.state !== "ended";
	return html`<div class="drawer-body">
		<p class="drawer-lead">
			<${ClassBadge} priority=${row.priority} /> <span>${row.model}</span> <${StateMark} kind=${row.state} />
			${!is_live && html`<${Level} level=${row.error ? "bad" : ""}>${endWords(row)}<//>`}
			${is_live && row.waits_for && html`<span class="muted">${briefly(row.waits_for)}</span>`}
		</p>
		${is_live && may.steer && html`<${Controls} row=${row} />`}
		<${Course} row=${row} now=${now} />
		<h3>Times</h3><${Times} row=${row} now=${now} />
		<h3>Tokens</h3><${Tokens} row=${row} />
		<h3>Story</h3><${Moves} row=${row} now=${now} />
		${may.administrate && !may.texts && html`<p class="muted">Texts are shown where the server runs with --request-texts.</p>`}
		${may.texts && !row.num_members && row.kind !== "load" && html`<${Text} key=${row.request_id} row=${row} now=${now} />`}
	</div>`;
}

function Controls({ row }) {
	const id = row.request_id;
	return html`<div class="buttons">
		${row.state === "paused"
			? html`<${ActButton} act=${() => actions.resume(id)}>Resume<//>`
			: row.kind !== "load" && html`<${ActButton} act=${() => actions.pause(id)}>Pause<//>`}
		<${ActButton} danger act=${() => actions.cancel(id)}>Cancel<//>
	</div>`;
}

/** Its whole life as one bar a choice. */
function Course({ row, now }) {
	const end = row.state === "ended" ? endedAt(row) : now;
	const choices = choicesOf(row).filter((choice) => choice.segments.length);
	if (!choices.length) return null;
	return html`<div class="course">
		${choices.map((choice) => {
			const wordsOf = (each) => `${stateWords(each.kind)} ${duration((each.to ?? end) - each.from)}`;
			return html`<div class="course-bar bar ${classOf(row)}" role="img" aria-label=${choice.segments.map(wordsOf).join(", ")}>
				${choice.segments.map((each) => {
					const style = inside({ from: Math.max(each.from, row.arrived_at), to: each.to ?? end }, { from: row.arrived_at, to: end });
					return html`<i class="segment ${each.kind}" title=${wordsOf(each)} style=${style}></i>`;
				})}
			</div>`;
		})}
		<p class="course-ends"><time>${clockTime(row.arrived_at)}</time><span>${duration(end - row.arrived_at)}</span><time>${row.state === "ended" ? clockTime(end) : "now"}</time></p>
	</div>`;
}

/** Of a live request what its moves tell: figures come with its end. */
function timesOf(row, now) {
	if (row.state === "ended") return { ...row, whole_s: row.end_to_end_s ?? endedAt(row) - row.arrived_at };
	const segments = choicesOf(row)[0].segments;
	const slot_at = segments.find((each) => each.slot !== null)?.from ?? now;
	const token_at = segments.find((each) => each.kind === "decode")?.from ?? null;
	const first_token_s = token_at && token_at - row.arrived_at;
	return { ...row, first_token_s, queue_s: slot_at - row.arrived_at, decode_s: token_at && now - token_at, whole_s: now - row.arrived_at };
}

function Times({ row, now }) {
	const { queue_s, first_token_s, decode_s, whole_s, itl_ms: itl } = timesOf(row, now);
	const read_s = first_token_s == null ? null : Math.max(0, first_token_s - (queue_s ?? 0));
	return html`<${Figures} of=${[
		["In the queue", duration(queue_s ?? 0)],
		["To read", duration(read_s), "slot to first token"],
		["First token", duration(first_token_s), "after arrival"],
		["To write", duration(decode_s || null)],
		["End to end", duration(whole_s)],
		row.parked_s > 0 && ["Parked", duration(row.parked_s)],
		itl && ["Between tokens", milliseconds(itl.mean), `mean; p50 ${milliseconds(itl.p50)}`],
		itl && ["99 % within", milliseconds(itl.p99), `p99; longest ${milliseconds(itl.max)}`],
		row.waited_for && ["Waited longest for", row.waited_for],
	]} />`;
}

function Tokens({ row }) {
	const cached = row.cached_tokens ? `${count(row.cached_tokens)} stored${row.cache_source ? `: ${row.cache_source}` : ""}` : "none stored";
	const reading = ["prefill", "replayed"].includes(row.state) && row.processed_tokens < row.prompt_tokens;
	const drafted = row.draft_tokens > 0;
	return html`<${Figures} of=${[
		["Prompt", count(row.prompt_tokens), cached],
		reading && ["Read so far", count(row.processed_tokens), percent(row.processed_tokens / row.prompt_tokens)],
		["Written", row.state === "ended" || row.completion_tokens ? count(row.completion_tokens) : "–", row.max_tokens != null && `${count(row.max_tokens)} at most`],
		row.tokens_per_second != null && ["Tokens a second", rate(row.tokens_per_second)],
		drafted && ["Guessed right", percent(row.accepted_tokens / row.draft_tokens), `${count(row.accepted_tokens)} of ${count(row.draft_tokens)}`],
		row.num_members && ["Requests of it", `${count(row.num_done)} of ${count(row.num_members)}`],
		["Gave its slot", plural(row.num_parks ?? 0, "time")],
		["Engines survived", count(row.num_restarts ?? 0)],
	]} />`;
}

function Moves({ row, now }) {
	return html`<ol class="story">
		${storyOf(row, now).map(
			(each) => html`<li>
				<time title=${clockTime(each.at)}>+${duration(each.offset_s)}</time>
				<i class="mark ${each.kind}" aria-hidden="true"></i>
				<span>${linked(each)}</span>
				<small>${each.for_s >= 0.05 ? duration(each.for_s) : ""}</small>
			</li>`,
		)}
	</ol>`;
}

/** The text of a move, with the other request that it names as a way there. */
function linked({ text, by }) {
	const name = by && briefly(by);
	const at = by ? text.indexOf(name) : -1;
	if (at < 0) return text;
	return html`${text.slice(0, at)}<${RequestLink} id=${by} />${text.slice(at + name.length)}`;
}

/** What it reads and writes: asked for only while this tab's switch is on. */
function Text({ row, now }) {
	const [is_shown, setShown] = useState(texts.get() === "on");
	const [found, setFound] = useState({});
	const id = row.request_id;
	const turn = row.state === "ended" ? "" : Math.floor(now / 2); // a live one writes on
	useEffect(() => {
		if (!is_shown) return undefined;
		const leaving = new AbortController();
		const settled = (text, error) => leaving.signal.aborted || setFound({ text, error });
		textOf(id, leaving.signal).then((text) => settled(text), (error) => settled(null, error));
		return () => leaving.abort();
	}, [id, is_shown, turn]);
	const flip = () => {
		texts.set(is_shown ? null : "on");
		setShown(!is_shown);
		setFound({});
	};
	const { text, error } = found;
	return html`<h3>Text</h3>
		<label class="check"><input type="checkbox" role="switch" checked=${is_shown} onChange=${flip} />Show text</label>
		${error && html`<p class="failed" role="alert">${error.message}</p>`}
		${text && html`<${TextPart} title="Prompt" part=${text.prompt} />`}
		${text?.choices.map((part, index, all) => html`<${TextPart} title=${all.length > 1 ? `Choice ${index + 1}` : "Answer"} part=${part} />`)}`;
}

function TextPart({ title, part }) {
	if (!part) return html`<p class="muted">${title}: token ids</p>`;
	const left = part.num_left_out > 0 && `the end of ${count(part.num_chars)} characters; ${count(part.num_left_out)} before it are not shown`;
	return html`<h4>${title} ${left && html`<small>${left}</small>`}</h4>
		<pre tabindex="0" aria-label=${title}>${part.text || "nothing yet"}</pre>`;
}
