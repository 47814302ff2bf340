"""`stoker serve` as a process of its own, on a port the system chose."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

READY_S = 120.0
STOKER = (sys.executable, "-m", "stoker.cli")


class Server:
    """From `with` to the end of its process.

    Attributes:
        ready: the readiness line.
        url: where it listens.
    """

    def __init__(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        self._how: dict[str, Any] = {"cwd": cwd, "env": env, "stdin": subprocess.DEVNULL}
        self._words = [*STOKER, "serve", *words, "--host", "127.0.0.1", "--port", "0"]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._words, stdout=subprocess.PIPE, text=True, **self._how)
        watch = threading.Timer(READY_S, self._process.kill)
        watch.start()
        assert self._process.stdout
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            self._process.wait()
            msg = f"{' '.join(self._words[2:])} ended with {self._process.returncode} before it was ready"
            raise AssertionError(msg)
        self.ready: dict[str, Any] = json.loads(line)
        self.url = f"http://127.0.0.1:{self.ready['port']}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            status = self._process.wait(READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()
        assert status in {0, 130}, f"the server ended with {status}"
