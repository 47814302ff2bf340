"""The prefix cache: what was computed once, kept for whoever asks for it again (SPEC C)."""
