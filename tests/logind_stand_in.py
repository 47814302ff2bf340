"""A private bus and, on it, what stands in for logind: it hands out locks and tells of sleep and waking."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

from dbus_fast import Message, MessageType
from dbus_fast.aio import MessageBus

DAEMON = shutil.which("dbus-daemon") or ""
SERVICE = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
INTERFACE = "org.freedesktop.login1.Manager"
CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""


class PrivateBus:
    """A dbus-daemon of this test's own."""

    def __init__(self, folder: Path) -> None:
        config = folder / "bus.conf"
        config.write_text(CONFIG.format(socket=folder / "bus.sock"))
        self._daemon = subprocess.Popen(
            [DAEMON, f"--config-file={config}", "--nofork", "--print-address=1"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._daemon.stdout is not None
        self.address = self._daemon.stdout.readline().strip()

    def stop(self) -> None:
        """End the daemon. Idempotent."""
        self._daemon.terminate()
        self._daemon.wait()
        assert self._daemon.stdout is not None
        self._daemon.stdout.close()


class LogindStandIn:
    """Answers `Inhibit` and sends `PrepareForSleep`.

    Attributes:
        asked: arguments of each `Inhibit`.
        askers: who asked, by their names on the bus.
        refuses: whether it refuses them from now on.
    """

    def __init__(self, address: str, *, name: str = SERVICE) -> None:
        self._address = address
        self._name = name
        self._bus: MessageBus | None = None
        self._locks: list[int] = []  # our ends of the pipes
        self._news = asyncio.Event()
        self.asked: list[list[str]] = []
        self.askers: list[str | None] = []
        self.refuses = False

    async def __aenter__(self) -> Self:
        self._bus = await MessageBus(self._address, negotiate_unix_fd=True).connect()
        self._bus.add_message_handler(self._answer)
        if self._name:
            await self._bus.request_name(self._name)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._bus is not None
        self._bus.disconnect()
        await self._bus.wait_for_disconnect()
        for lock in self._locks:
            os.close(lock)

    def _answer(self, message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL or message.member != "Inhibit":
            return False
        self._news.set()
        if self.refuses:
            return Message.new_error(message, "org.freedesktop.DBus.Error.AccessDenied", "not you")
        self.asked.append(message.body)
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._locks.append(ours)
        self.askers.append(message.sender)
        assert self._bus is not None
        sent = self._bus.send(Message.new_method_return(message, "h", [0], [theirs]))
        sent.add_done_callback(lambda _: os.close(theirs))
        return True

    def is_held(self, number: int) -> bool:
        """Whether anybody has that lock open; a closed one reads as an end of file."""
        try:
            return os.read(self._locks[number], 1) != b""
        except BlockingIOError:
            return True

    async def has_been_asked(self, times: int) -> None:
        """Wait for that many locks to have been handed out."""
        while len(self.asked) < times:
            self._news.clear()
            await self._news.wait()

    async def is_through(self) -> None:
        """Wait until the bus has passed on all that was sent: it answers in order."""
        assert self._bus is not None
        await self._bus.introspect("org.freedesktop.DBus", "/org/freedesktop/DBus")

    def tell(self, *, is_asleep: bool, to: str | None = None) -> None:
        """Send the signal, to everybody or to one of them."""
        assert self._bus is not None
        signal = Message.new_signal(PATH, INTERFACE, "PrepareForSleep", "b", [is_asleep])
        signal.destination = to
        self._bus.send(signal)
