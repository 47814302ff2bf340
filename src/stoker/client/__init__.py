"""The caller's process: requests, models and streams as the application sees them."""
