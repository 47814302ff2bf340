/** The machines of a gate: how each is, and what was taken away from there. */

import { html } from "../dom.js";
import { count, duration, plural } from "../state/words.js";
import { Level, Section, Table } from "./parts.js";

const leveled = (name) => (each) => html`<${Level} of=${each[name] || "–"} />`;
const counted = (name) => (each) => count(each[name]);

export function Machines({ state, now }) {
	const columns = [
		["Machine", "nowrap", (each) => html`<b>${each.name}</b>`],
		["State", "", (each) => html`${leveled("state")(each)}${each.reason && html` <small>${each.reason}</small>`}`],
		["In slots", "n", (each) => (each.state === "down" ? "–" : `${each.num_busy} of ${each.num_slots}`)],
		["Waiting", "n wide", counted("num_waiting")],
		["Requests", "n", counted("num_requests")],
		["Moved away", "n", counted("num_moved")],
		["Heat", "wide", leveled("heat")],
		["Pressure", "wide", leveled("pressure")],
		["Models", "wide", (each) => each.models.join(", ")],
		["Heard", "n wide", (each) => (each.age_s == null ? "never" : `${duration(now - each.at + each.age_s)} ago`)],
	];
	const num_up = state.machines.filter((each) => each.state === "up").length;
	return html`<${Section} title="Machines" aside="${num_up} of ${plural(state.machines.length, "machine")} up">
		<${Table} label="Machines" columns=${columns} rows=${state.machines} keyOf=${(each) => each.name} />
	<//>`;
}
