"""`stoker ui`: the page of a running server, and recordings of what it shows."""
