/** The page: head, the tab that is shown, the story of a request beside it, dialogs and notes. */

import { follow, html, render, useEffect, useErrorBoundary, useRef, useState } from "./dom.js";
import { key } from "./shell/api.js";
import { KeyDialog, KeysDialog } from "./shell/dialogs.js";
import { line, now, open_feed, reopen_feed, state } from "./shell/feed.js";
import { Header, TABS, switch_theme } from "./shell/header.js";
import { go, open, place } from "./shell/place.js";
import { Toasts, close_newest } from "./shell/toasts.js";
import { RequestDrawer } from "./views/request.js";

function Stage({ tab: { View, is_own } }) {
	const [error] = useErrorBoundary();
	if (error) {
		return html`<div class="empty" role="alert">
			<p>This view failed: <code>${error.message}</code></p>
			<button onClick=${() => location.reload()}>Load the page again</button>
		</div>`;
	}
	return is_own ? html`<${View} />` : html`<${Live} View=${View} />`;
}

const refusedWords = ({ status, message }) => (status !== 401 ? message : key.get() ? "This server does not accept the key." : "This server asks for a key.");

function Live({ View }) {
	follow(state, now, line);
	if (!state.value.at) return html`<p class="empty">${line.value.state === "refused" ? refusedWords(line.value.error) : "Nothing has come yet"}</p>`;
	return html`<${View} ...${props()} />`;
}

const props = () => ({ state: state.value, now: now.value, may: state.value.may });

function Drawer() {
	follow(place, state, now);
	const { request, tab } = place.value;
	const [error] = useErrorBoundary();
	if (!request || error || !state.value.at) return null;
	return html`<${RequestDrawer} key="${tab} ${request}" ...${props()} requestId=${request} />`;
}

/** Whether a key pressed there is text for something. */
function is_typed(event) {
	return event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select");
}

function useShortcuts(show_keys) {
	useEffect(() => {
		const pressed = (event) => {
			if (is_typed(event) || event.defaultPrevented || document.querySelector("dialog[open]")) return;
			const tab = TABS[Number(event.key) - 1];
			if (tab) go(tab.id);
			else if (event.key === "t") switch_theme();
			else if (event.key === "?") show_keys();
			else if (event.key === "Escape") place.value.request ? open(null) : close_newest();
		};
		addEventListener("keydown", pressed);
		return () => removeEventListener("keydown", pressed);
	}, []);
}

function App() {
	follow(place, line);
	const tab = TABS.find((one) => one.id === place.value.tab) ?? TABS[0];
	const [dialog, set_dialog] = useState(null);
	const main = useRef(null);
	const close = () => set_dialog(null);
	const given = () => {
		close();
		reopen_feed();
	};
	useShortcuts(() => set_dialog("keys"));
	useEffect(() => {
		document.title = `${tab.title} · Stoker`;
	}, [tab]);
	const { state: is, error } = line.value;
	useEffect(() => {
		if (is === "refused" && error.status === 401) set_dialog("key");
	}, [is, error]);
	const skip = (event) => {
		event.preventDefault();
		main.current.focus();
	};
	return html`
		<a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
		<${Header} tab=${tab} ask_key=${() => set_dialog("key")} />
		<main id="main" ref=${main} tabindex="-1" class="stage ${tab.id}">
			<h1 class="sr-only">${tab.title}</h1>
			<${Stage} key=${tab.id} tab=${tab} />
		</main>
		<${Drawer} />
		<${Toasts} />
		${dialog === "key" && html`<${KeyDialog} problem=${is === "refused" ? refusedWords(error) : null} given=${given} close=${close} />`}
		${dialog === "keys" && html`<${KeysDialog} tabs=${TABS} close=${close} />`}
	`;
}

open_feed();
render(html`<${App} />`, document.getElementById("app"));
