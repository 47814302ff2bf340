"""Servers beside each other and beside the library's own limit on an accelerator."""
