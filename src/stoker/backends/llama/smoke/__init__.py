"""Trials of native code in a child process before an engine depends on it."""
