/** Where the page is, as its address says: `#/TAB`, and `?request=ID` where the story of one is open. */

import { signal } from "../dom.js";

function read() {
	const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
	return { tab: path, request: new URLSearchParams(query).get("request") };
}

export const place = signal(read());
addEventListener("hashchange", () => (place.value = read()));

export const address = (tab) => `#/${tab}`;

export function go(tab) {
	location.hash = address(tab);
}

/** Show the story of a request over the tab; null: close it. */
export function open(request) {
	const tab = place.value.tab;
	location.hash = request ? `${address(tab)}?${new URLSearchParams({ request })}` : address(tab);
}
