"""The prefix cache: what was computed, kept in memory and on disk for prompts that begin with it (SPEC C)."""
