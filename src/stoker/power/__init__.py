"""Sleep of the machine, on Linux with logind."""
