"""The program of a worker process, run as a file: `python -P child.py DESCRIPTOR LIMIT_S MAX_BYTES`.

It loads the modules that jobs need and nothing else: the package `stoker`, whose `__init__` exports the
runtime, is entered without being run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def _enter_package() -> None:
    package = ModuleType("stoker")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules[package.__name__] = package


def main() -> None:
    """Serve jobs on an inherited socket until its other end closes."""
    _enter_package()
    from stoker.client.worker.jobs import serve  # noqa: PLC0415 - see above

    descriptor, limit_s, max_bytes = sys.argv[1:]
    serve(int(descriptor), float(limit_s), int(max_bytes))


if __name__ == "__main__":
    main()
