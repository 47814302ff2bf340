/** The tabs, and the view of each. */

import { View as Chat } from "../chat/chat.js";
import { View as Cache } from "../views/cache.js";
import { View as History } from "../views/history.js";
import { View as Machine } from "../views/machine.js";
import { View as Memory } from "../views/memory.js";
import { View as Now } from "../views/now.js";

export const TABS = [
	{ id: "now", title: "Now", View: Now },
	{ id: "history", title: "History", View: History },
	{ id: "memory", title: "Memory", View: Memory },
	{ id: "cache", title: "Cache", View: Cache },
	{ id: "machine", title: "Machine", View: Machine },
	{ id: "chat", title: "Chat", View: Chat, is_own: true },
];
