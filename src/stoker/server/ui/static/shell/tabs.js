/** The tabs: each loads its view when it is first shown. */

export const TABS = [
	{ id: "now", title: "Now", load: () => import("../views/now.js") },
	{ id: "history", title: "History", load: () => import("../views/history.js") },
	{ id: "memory", title: "Memory", load: () => import("../views/memory.js") },
	{ id: "cache", title: "Cache", load: () => import("../views/cache.js") },
	{ id: "machine", title: "Machine", load: () => import("../views/machine.js") },
	// It follows what it needs of the state by itself: an answer that is read is not drawn again with each event.
	{ id: "chat", title: "Chat", load: () => import("../chat/chat.js"), is_own: true },
];
