"""Crashes of native code: what a process does before one may come, and what is quoted of its last words."""

from __future__ import annotations

import faulthandler
import os

from stoker.private import forbid_core_files

MAX_LINES = 8
MAX_CHARS = 500
_DUMP_HEAD = "Fatal Python error:"


def prepare_to_crash() -> None:
    """Leave no core file, say on stderr what crashed, and no more than that.

    ggml has a debugger print every frame of itself, which takes a while and hides what it said.
    """
    forbid_core_files()
    faulthandler.enable()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def native_text(said: bytes) -> str:
    """The last lines before Python's dump of its threads, and the dump's first; at most MAX_CHARS.

    Args:
        said: the end of what a process wrote to its stderr.
    """
    lines: list[str] = []
    for line in said.decode(errors="replace").splitlines():
        if line.strip():
            lines.append(line.strip())
        if line.startswith(_DUMP_HEAD):
            break
    return " | ".join(lines[-MAX_LINES:])[-MAX_CHARS:]
