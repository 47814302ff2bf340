"""`stoker chat`: a conversation in the terminal."""
