"""Processes that can be ended, for foreign or unbounded work of the front: templates, grammars as text."""
