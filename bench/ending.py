"""An end that was asked for: SIGTERM stops a run as Ctrl-C does, so that no server outlives it."""

from __future__ import annotations

import asyncio
import signal
import threading


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the task that calls this, where signals reach it: on the main thread."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
