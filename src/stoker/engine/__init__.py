"""The process that owns the device, and the front's side of it."""
