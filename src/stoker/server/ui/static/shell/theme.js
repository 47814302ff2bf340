// Before anything is drawn, so that a chosen theme does not flash: no module, as those are deferred.
(() => {
	try {
		const theme = localStorage.getItem("stoker.theme");
		if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
	} catch {
		// storage is forbidden: the system's theme
	}
})();
