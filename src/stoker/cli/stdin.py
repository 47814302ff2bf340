"""What the user piped in: read when it is wanted, never waited for in vain."""

from __future__ import annotations

import select
import stat
import sys
from os import fstat

import typer

FIRST_BYTE_S = 2.0


def piped_text() -> str:
    """All of standard input; empty for a terminal."""
    return "" if sys.stdin.isatty() else sys.stdin.read()


def piped_beside_a_prompt() -> str:
    """Standard input where a prompt was given too: all of it if it is a file or something comes soon.

    A program started by another one often has an open pipe on stdin that nobody writes to.
    """
    try:
        kind = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a real file
        return ""
    if stat.S_ISREG(kind):
        return sys.stdin.read()
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return ""
    if select.select([sys.stdin], [], [], FIRST_BYTE_S)[0]:
        return sys.stdin.read()
    typer.echo("stoker: nothing came on standard input; going on without it (a prompt of - waits)", err=True)
    return ""
