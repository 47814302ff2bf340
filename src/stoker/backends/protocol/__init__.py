"""What the engine asks of a backend, and the small protocols that a backend may add."""
