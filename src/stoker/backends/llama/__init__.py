"""Models of llama.cpp."""
