"""Main of the engine process; started by `stoker.client.process.transport`, not by hand."""

import sys

from stoker.engine.driver import begin_driver

begin_driver()  # beside the imports that follow

from stoker.engine.process import serve  # noqa: E402 - see above

sys.exit(serve(sys.argv[1:]))
