"""What comes in and what it may cost: connections, heads and bodies of requests, descriptors."""
