"""Prometheus metrics: what is counted as requests pass and end, and the figures of the engine's status."""
