"""Memory: what there is and, later, who gets it."""
