"""`python -m stoker.cli`: the command where its script is not on the path."""

from stoker.cli.main import main

main()
