"""Programs of others that are started against the running server."""
