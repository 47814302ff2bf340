"""The machine: its memory, heat and cores, and what is given up where memory is short (SPEC M)."""
