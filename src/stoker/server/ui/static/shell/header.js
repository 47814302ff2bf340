/** The head of the page: where one is, how the stream is, and what holds for this tab. */

import { View as Chat } from "../chat/chat.js";
import { follow, html, signal } from "../dom.js";
import { View as Cache } from "../views/cache.js";
import { View as History } from "../views/history.js";
import { View as Machine } from "../views/machine.js";
import { View as Memory } from "../views/memory.js";
import { View as Now } from "../views/now.js";
import { key } from "./api.js";
import { line, now, replay, state } from "./feed.js";
import { address } from "./place.js";
import { forGood } from "./storage.js";

/** The tabs, and the view of each. */
export const TABS = [
	{ id: "now", title: "Now", View: Now },
	{ id: "history", title: "History", View: History },
	{ id: "memory", title: "Memory", View: Memory },
	{ id: "cache", title: "Cache", View: Cache },
	{ id: "machine", title: "Machine", View: Machine },
	{ id: "chat", title: "Chat", View: Chat, is_own: true },
];
const OLD_AFTER_S = 12; // the server says something every ten seconds
const THEMES = { system: "System colours", light: "Light", dark: "Dark" };
const ICON = new URL("../icon.svg", import.meta.url).href;
const stored = forGood("theme");
const theme = signal(document.documentElement.dataset.theme ?? "system");

/** The next of system, light and dark. */
export function switch_theme() {
	const names = Object.keys(THEMES);
	theme.value = names[(names.indexOf(theme.value) + 1) % names.length];
	const root = document.documentElement;
	if (theme.value === "system") delete root.dataset.theme;
	else root.dataset.theme = theme.value;
	stored.set(theme.value === "system" ? null : theme.value);
}

const seconds = (count) => (count < 90 ? `${Math.round(count)} s` : `${Math.round(count / 60)} min`);

/** How the stream is: [level, text]. */
function standing() {
	const { state: is, heardAt, retryAt, error } = line.value;
	const old_s = heardAt ? (performance.now() - heardAt) / 1000 : 0;
	const as_of = heardAt ? `, as of ${seconds(old_s)} ago` : "";
	if (is === "refused") return ["bad", error.status === 404 ? "no events here" : "no entry without a key"];
	if (is === "connecting") return ["warn", `connecting${as_of}`];
	if (is === "waiting") return ["bad", `lost; again in ${seconds(Math.max(0, retryAt - performance.now()) / 1000)}${as_of}`];
	if (!state.value.at) return ["warn", "connecting"];
	if (replay.value) return ["good", replay.value.speed === "max" ? "recording" : `recording, ${replay.value.speed}×`];
	return old_s > OLD_AFTER_S ? ["warn", `silent${as_of}`] : ["good", "live"];
}

function Standing() {
	follow(line, now, replay, state);
	const [level, text] = standing();
	return html`<span class="standing ${level}" role="status"><i aria-hidden="true"></i>${text}</span>`;
}

function May() {
	follow(state, replay);
	if (!state.value.at || state.value.may.administrate || replay.value) return null;
	return html`<span class="badge">${key.get() ? "key may not administrate" : "may not administrate"}</span>`;
}

const ICONS = {
	system: "M8 1.5a6.5 6.5 0 1 0 0 13zM8 1.5a6.5 6.5 0 0 1 0 13",
	light: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 .5v2M8 13.5v2M.5 8h2M13.5 8h2M2.7 2.7l1.4 1.4M11.9 11.9l1.4 1.4M13.3 2.7l-1.4 1.4M4.1 11.9l-1.4 1.4",
	dark: "M13.5 9.8A6 6 0 0 1 6.2 2.5 6 6 0 1 0 13.5 9.8z",
	key: "M6.8 9.2a3.6 3.6 0 1 1 1.1 1.1L6.5 11.7H5v1.5H3.5v1.3H1.5v-2zM11 5h.01",
};

function Icon({ name }) {
	return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

export function Header({ tab, ask_key }) {
	follow(theme, replay);
	return html`<header class="head">
		<a class="brand" href=${address("now")} aria-label="Stoker">
			<img src=${ICON} alt="" width="22" height="22" /><span>Stoker</span>
		</a>
		<nav class="tabs" aria-label="Views">
			${TABS.map(
				(one) => html`<a key=${one.id} href=${address(one.id)} aria-current=${one.id === tab.id ? "page" : null}>${one.title}</a>`,
			)}
		</nav>
		<div class="tools">
			<${Standing} /><${May} />
			<button class="plain" onClick=${switch_theme} aria-label="Colours: ${THEMES[theme.value]}" title=${THEMES[theme.value]}>
				<${Icon} name=${theme.value} />
			</button>
			${!replay.value &&
			html`<button class="plain" onClick=${ask_key} aria-label=${key.get() ? "Key: one is set" : "Key: none"} title="Key">
				<${Icon} name="key" />${key.get() && html`<i class="dot" aria-hidden="true"></i>`}
			</button>`}
		</div>
	</header>`;
}
