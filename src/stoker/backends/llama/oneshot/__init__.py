"""Scores, embeddings and choices that llama.cpp computes outside of generation."""
