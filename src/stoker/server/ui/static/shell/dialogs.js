/** The dialogs of the shell: the key of this tab, and what the keyboard does. */

import { html, useEffect, useRef, useState } from "../dom.js";
import { key } from "./api.js";

function Dialog({ label, close, children }) {
	const found = useRef(null);
	useEffect(() => {
		const before = document.activeElement;
		found.current.showModal();
		return () => before?.focus?.();
	}, []);
	return html`<dialog class="dialog" ref=${found} aria-label=${label} onClose=${close} onCancel=${close}>${children}</dialog>`;
}

/** Asks for a key; `problem`: why. `given()` is called when there is another one. */
export function KeyDialog({ problem, given, close }) {
	const [text, set_text] = useState("");
	const use = (chosen) => {
		key.set(chosen);
		given();
	};
	const submit = (event) => {
		event.preventDefault();
		use(text.trim());
	};
	return html`<${Dialog} label="Key" close=${close}>
		<form onSubmit=${submit}>
			<h2>Key</h2>
			<p>
				${problem ?? "What you see and may do here is what the key allows."}
				${" "}It is kept in this tab until you close it, and sent to this server alone.
			</p>
			<label for="key">API key</label>
			<input id="key" type="password" autocomplete="off" required autofocus
				value=${text} onInput=${(event) => set_text(event.target.value)} />
			<div class="row">
				<button type="submit">Use this key</button>
				${key.get() && html`<button type="button" class="plain" onClick=${() => use("")}>Forget the key</button>`}
				<button type="button" class="plain" onClick=${close}>Close</button>
			</div>
		</form>
	<//>`;
}

export function KeysDialog({ tabs, close }) {
	const rows = [
		...tabs.map((tab, index) => [String(index + 1), tab.title]),
		["t", "light, dark or the system's colours"],
		["Enter", "open the request that has the focus"],
		["Esc", "close what is open"],
		["?", "this list"],
	];
	return html`<${Dialog} label="Keyboard" close=${close}>
		<h2>Keyboard</h2>
		<dl class="keys">${rows.map(([name, text]) => html`<div key=${name}><dt><kbd>${name}</kbd></dt><dd>${text}</dd></div>`)}</dl>
		<div class="row"><button autofocus onClick=${close}>Close</button></div>
	<//>`;
}
