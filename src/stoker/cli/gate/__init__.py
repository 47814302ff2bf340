"""`stoker gate`."""
