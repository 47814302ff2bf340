"""Stored prefixes of the loaded models: kept, found, moved to disk and back."""
