"""Stoker's own API: models, requests, scores, states, probes."""
