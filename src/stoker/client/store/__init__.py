"""What of the client survives the program: suspended requests, the last models."""
