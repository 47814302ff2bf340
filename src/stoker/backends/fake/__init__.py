"""A deterministic backend for tests and trials: it answers by arithmetic and needs no weights."""
