"""A store of prefixes that several machines share: its files, its rule, its tier."""
