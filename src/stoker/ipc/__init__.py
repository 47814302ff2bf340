"""The words that client and engine both speak, and how they travel."""
