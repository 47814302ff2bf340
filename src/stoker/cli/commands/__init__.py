"""One module a command of the `stoker` program."""
