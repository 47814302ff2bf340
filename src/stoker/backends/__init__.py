"""What computes: one folder or module a kind of backend, all behind `protocol`."""
