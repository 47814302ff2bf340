"""The vocabulary of a GGUF file: tokenising, pieces, bounds of lengths."""
