"""Sleep of the machine, what survives the program, and what is told of all that."""
