"""Live requests from submission to their one terminal event."""
