"""GGUF headers, read within bounds and checked before native code sees the file."""
