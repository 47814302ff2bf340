"""Processes that can be ended, for foreign or unbounded work of the client: templates, grammars as text."""
