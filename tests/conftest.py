"""What every test starts from."""

import signal

# A shell that runs us in the background leaves Ctrl-C ignored, for us and for every program we start.
signal.signal(signal.SIGINT, signal.default_int_handler)
