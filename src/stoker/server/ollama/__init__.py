"""Ollama's API: bodies, routes and their writer."""
