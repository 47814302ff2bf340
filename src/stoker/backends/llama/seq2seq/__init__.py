"""Encoder-decoders on llama.cpp: the source and what the decoder computes from it."""
