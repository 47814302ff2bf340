/** What views can do, each by one route; what goes wrong is shown, and thrown on. */

import { document_of, of_request } from "./api.js";
import { toast } from "./toasts.js";

async function post(path, body = {}) {
	try {
		return await document_of("POST", path, { body });
	} catch (error) {
		toast(error);
		throw error;
	}
}

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
