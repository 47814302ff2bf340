"""Tells the service manager that started this program how it is doing (sd_notify(3)).

Apart because it is a protocol of its own.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send `READY=1`, `STOPPING=1` and the like; without a manager that listens nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        log.warning("the service manager cannot be told %s: %s", state, error)
