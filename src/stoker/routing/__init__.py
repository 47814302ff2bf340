"""Which machine of a site takes a request (SPEC P)."""
