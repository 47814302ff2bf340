"""Sleep of the machine."""
