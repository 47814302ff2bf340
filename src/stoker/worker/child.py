"""The program of a worker process, run as a file: `python -P child.py DESCRIPTOR LIMIT_S MAX_BYTES`.

It loads the modules that jobs need and nothing else: the packages above them, whose `__init__` export a
runtime and what computes with numpy, are entered without being run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def _enter_packages() -> None:
    source = Path(__file__).resolve().parents[1]
    for name, folder in (("stoker", source), ("stoker.decode", source / "decode")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def main() -> None:
    """Serve jobs on an inherited socket until its other end closes."""
    _enter_packages()
    from stoker.worker.service import serve  # noqa: PLC0415 - see above

    descriptor, limit_s, max_bytes = sys.argv[1:]
    serve(int(descriptor), float(limit_s), int(max_bytes))


if __name__ == "__main__":
    main()
