/** The head of the page: where one is, how the stream is, and what holds for this tab. */

import { follow, html, signal } from "../dom.js";
import { key } from "./api.js";
import { line, now, replay, state } from "./feed.js";
import { address } from "./place.js";
import { forGood } from "./storage.js";

const OLD_AFTER_S = 12; // the server says something every ten seconds
const THEMES = { system: "System colours", light: "Light", dark: "Dark" };
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
	if (replay.value) return ["good", replay.value.speed === Infinity ? "recording" : `recording, ${replay.value.speed}×`];
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
	const text = key.get() ? "This key may look, not steer" : "Without an operator's key: look, not steer";
	return html`<span class="badge" title=${text}>${key.get() ? "key may not administrate" : "may not administrate"}</span>`;
}

const ICONS = {
	system: "M8 1.500a6.500 6.500 0 1 0 0 13zM8 1.500a6.500 6.500 0 0 1 0 13",
	light: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 .500v2M8 13.500v2M.500 8h2M13.500 8h2M2.700 2.700l1.400 1.400M11.900 11.900l1.400 1.400M13.300 2.700l-1.400 1.400M4.100 11.900l-1.400 1.400",
	dark: "M13.500 9.800A6 6 0 0 1 6.200 2.500 6 6 0 1 0 13.500 9.800z",
	key: "M6.800 9.200a3.600 3.600 0 1 1 1.100 1.100L6.500 11.700H5v1.500H3.500v1.300H1.500v-2zM11 5h.010",
};

function Icon({ name }) {
	return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

export function Header({ tabs, tab, ask_key }) {
	follow(theme, replay);
	return html`<header class="head">
		<a class="brand" href=${address(tabs[0].id)} aria-label="Stoker">
			<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 1c.600 2.800 4 4 4 7.700A4 4 0 0 1 8 13a4 4 0 0 1-4-4.300c0-1.700.900-2.800 1.700-3.700.200 1.100.700 1.700 1.300 2C6.700 4.800 7.100 2.800 8 1z" /></svg>
			<span>Stoker</span>
		</a>
		<nav class="tabs" aria-label="Views">
			${tabs.map(
				(one) => html`<a key=${one.id} href=${address(one.id)} aria-current=${one.id === tab.id ? "page" : null}>${one.title}</a>`,
			)}
		</nav>
		<div class="tools">
			<${Standing} /><${May} />
			<button class="plain" onClick=${switch_theme} aria-label=${`Colours: ${THEMES[theme.value]}`} title=${THEMES[theme.value]}>
				<${Icon} name=${theme.value} />
			</button>
			${!replay.value &&
			html`<button class="plain" onClick=${ask_key} aria-label=${key.get() ? "Key: one is set" : "Key: none"} title="Key">
				<${Icon} name="key" />${key.get() && html`<i class="dot" aria-hidden="true"></i>`}
			</button>`}
		</div>
	</header>`;
}
