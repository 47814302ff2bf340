"""Exit codes of the command line: the one table, which docs/exit-codes.md repeats for people.

Apart because commands end with them as well as what runs the commands.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    NO = 1
    FAULT = 2
    INTERRUPTED = 130
    READER_LEFT = 141


MEANINGS = {
    ExitCode.DONE: "Done.",
    ExitCode.NO: "It worked, and the answer is no: `doctor`, `cache verify` or `config check` found "
    "something wrong, `plan` no room, or a question was answered with no.",
    ExitCode.FAULT: "The input, the model or the machine is at fault; one line on stderr says what. "
    "`read` and a `chat` from a pipe go on with the rest first.",
    ExitCode.INTERRUPTED: "Ctrl-C.",
    ExitCode.READER_LEFT: "Whoever read the output left before its end, as in `| head -1`; "
    "a shell says the same of a program that SIGPIPE ended.",
}
