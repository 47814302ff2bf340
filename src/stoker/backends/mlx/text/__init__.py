"""Text to the tokens of a folder's model and back."""
