"""The models that the application has asked for, by name."""
