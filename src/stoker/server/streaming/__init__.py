"""A request's events on their way to an HTTP client."""
