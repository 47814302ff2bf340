"""Stored prefixes as files: their format, their index, the tier."""
