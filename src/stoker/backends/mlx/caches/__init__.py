"""What MLX keeps of sequences: a cache a layer, of one sequence or of the rows of a batch."""
