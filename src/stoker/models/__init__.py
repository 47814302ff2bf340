"""Model files: what is in them, which are here, and how one gets here."""
