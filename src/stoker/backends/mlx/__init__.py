"""Models of folders on MLX."""
