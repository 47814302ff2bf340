"""Main of the engine process; started by `stoker.engine.carrier`, not by hand."""

import sys

from stoker.engine.process import serve

sys.exit(serve(sys.argv[1:]))
