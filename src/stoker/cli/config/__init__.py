"""`stoker config`: the settings file and the keys in it."""
