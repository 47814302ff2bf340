"""A running server as a runtime: the library's methods over HTTP."""
