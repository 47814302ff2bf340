"""KV cells and slots of one model: what holds what, and what moves (pure)."""
