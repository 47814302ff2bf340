"""Guessed tokens: found, verified in one step, and how many pay."""
