"""`stoker calibrate`: the settings with which a model is quickest on this machine."""
