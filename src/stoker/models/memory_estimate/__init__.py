"""What a model will take in memory, by its header, and whether that fits."""
