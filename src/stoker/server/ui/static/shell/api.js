/** Calls of the server's routes, with the key of this tab; ApiError has the server's code. */

import { forTab } from "./storage.js";
import { toast } from "./toasts.js";

const stored = forTab("key");

export const key = {
	get: () => stored.get() ?? "",
	/** Keep a key until the tab is closed; empty: none. */
	set: (text) => stored.set(text || null),
};

export class ApiError extends Error {
	constructor(code, message, status) {
		super(message);
		this.code = code;
		this.status = status;
	}
}

/** The answer to a request, when its head is there; throws ApiError, or AbortError where `signal` ends it. */
export async function ask(method, path, { body, signal, headers } = {}) {
	const sent = { ...headers };
	if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
	if (body !== undefined) sent["Content-Type"] = "application/json";
	let answer;
	try {
		const text = body === undefined ? undefined : JSON.stringify(body);
		answer = await fetch(path, { method, headers: sent, body: text, signal, cache: "no-store", redirect: "error" });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new ApiError("unreachable", "the server cannot be reached", 0);
	}
	if (!answer.ok) throw await refusal(answer);
	return answer;
}

export async function document_of(method, path, options) {
	return (await ask(method, path, options)).json();
}

async function refusal(answer) {
	let error = {};
	try {
		error = (await answer.json()).error ?? {};
	} catch {
		// something in between has answered, without our error shape
	}
	const message = error.message ?? `the server answered ${answer.status}`;
	return new ApiError(error.code ?? `http_${answer.status}`, message, answer.status);
}

export const of_request = (id, what) => `/v1/runtime/requests/${encodeURIComponent(id)}/${what}`;

export const textOf = (id, signal) => document_of("GET", of_request(id, "text"), { signal });

async function post(path, body = {}) {
	try {
		return await document_of("POST", path, { body });
	} catch (error) {
		toast(error);
		throw error;
	}
}

/** What views can do, each by one route; what goes wrong is shown, and thrown on. */
export const actions = {
	pause: (id) => post(of_request(id, "pause")),
	resume: (id) => post(of_request(id, "resume")),
	cancel: (id) => post(of_request(id, "cancel")),
	load: (model) => post("/v1/runtime/models/load", { model }),
	unload: (model) => post("/v1/runtime/models/unload", { model }),
	pin: (model, pinned) => post("/v1/runtime/models/pin", { model, pinned }),
	suspend: () => post("/v1/runtime/suspend"),
	wake: () => post("/v1/runtime/resume"),
};
