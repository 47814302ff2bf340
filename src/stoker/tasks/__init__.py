"""What callers ask for above one request: a chat, embeddings, a ranking, a choice."""
