"""Pictures on MLX: mlx-vlm's towers beside the networks of mlx-lm."""
