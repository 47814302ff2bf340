"""Other machines in the place of an engine of its own: what `stoker gate` serves with."""
