/** What views can do: the calls of the API, whose failures are shown and thrown on. */

import { calls } from "./api.js";
import { toast } from "./toasts.js";

function shown(call) {
	return async (...given) => {
		try {
			return await call(...given);
		} catch (error) {
			toast("bad", error.message, error.code);
			throw error;
		}
	};
}

export const actions = Object.fromEntries(Object.entries(calls).map(([name, call]) => [name, shown(call)]));
