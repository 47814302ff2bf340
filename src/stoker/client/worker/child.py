"""The program of a worker process: `python -P -m stoker.client.worker.child DESCRIPTOR LIMIT_S MAX_BYTES`.

Apart because it is a program: it serves jobs on an inherited socket until its other end closes.
"""

import sys

import stoker.chat.template  # noqa: F401 - here, so that the first chat does not wait for it
from stoker.client.worker.jobs import serve

serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
