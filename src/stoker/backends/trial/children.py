"""How the child processes of trials are run."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ASK_EVERY_S = 0.1


def run_child(
    command: list[str], on_wait: Callable[[], None], timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """`subprocess.run` that asks now and then whether to go on; the child never outlives it.

    Raises:
        subprocess.TimeoutExpired: it took longer than that.
    """
    until_s = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=ASK_EVERY_S)
                    return subprocess.CompletedProcess(command, child.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until_s:
                        raise
                on_wait()
        except BaseException:
            child.kill()
            raise
