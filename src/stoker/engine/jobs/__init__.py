"""Requests on the engine's side, and what prepares them before they are queued."""
