"""The projector of a vision model: from pixels to embeddings, in slices."""
