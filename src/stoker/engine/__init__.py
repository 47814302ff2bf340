"""The process that owns the device."""
