"""Whether a backend computes on this machine, found out in a child process and remembered."""
