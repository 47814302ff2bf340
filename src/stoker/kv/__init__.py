"""KV cells and slots of one model: who holds what, and what moves (pure)."""
