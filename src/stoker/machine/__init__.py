"""Memory: how much there is, who holds it, and what is given up where it gets short (SPEC M)."""
