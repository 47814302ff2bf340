"""Model files from a hub: references, downloads."""
