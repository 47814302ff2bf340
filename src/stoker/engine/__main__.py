"""Main of the engine process; started by `stoker.client.process.transport`, not by hand."""

import sys

from stoker.engine.process import serve

sys.exit(serve(sys.argv[1:]))
