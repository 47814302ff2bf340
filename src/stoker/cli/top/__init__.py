"""`stoker top`: what a running server does, in a terminal."""
