"""How many threads a step uses, and how long steps take."""
