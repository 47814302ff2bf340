"""The HTTP server: routes and wire shapes around one `stoker.runtime.Runtime`."""
