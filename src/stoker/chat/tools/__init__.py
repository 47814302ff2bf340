"""Tools in conversations: their layout for a model, and calls read from its text."""
