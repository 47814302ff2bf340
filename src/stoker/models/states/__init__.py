"""Initial states of recurrent models as files."""
