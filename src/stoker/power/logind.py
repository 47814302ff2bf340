"""A connection to logind: the lock that delays sleep, and the signals of sleep and wake.

Owns the D-Bus messages and the file descriptor of the lock. `power.sleep` acts on the signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Self

from dbus_fast import BusType, Message, MessageType
from dbus_fast.aio import MessageBus
from dbus_fast.errors import DBusFastError

from stoker.errors import MachineSetupError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

log = logging.getLogger(__name__)

SERVICE = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
INTERFACE = "org.freedesktop.login1.Manager"
SIGNAL = "PrepareForSleep"
ANSWER_S = 5.0  # a bus answers in milliseconds
MAX_WAITING = 64  # signals not read yet; a machine sends two a sleep

_BUS = "org.freedesktop.DBus"
_BUS_PATH = "/org/freedesktop/DBus"
_RULE = f"type='signal',sender='{SERVICE}',path='{PATH}',interface='{INTERFACE}',member='{SIGNAL}'"


class SleepLock:
    """Delays the machine's sleep for as long as logind allows (5 s by default)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def __repr__(self) -> str:
        return f"SleepLock({'released' if self._descriptor is None else 'held'})"

    def release(self) -> None:
        """Let the machine sleep. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Logind:
    """A connection to logind, from `async with` to its end.

    Args:
        bus_address: of the bus; None: the system's.

    Raises:
        MachineSetupError: on entering: the bus cannot be reached; the message says why.
    """

    def __init__(self, bus_address: str | None = None) -> None:
        self._address = bus_address
        self._bus: MessageBus | None = None
        self._signals: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)
        self._loss: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "connected" if self._bus is not None and self._bus.connected else "not connected"
        return f"<Logind {self._address or 'system bus'} {state}>"

    async def __aenter__(self) -> Self:
        try:
            bus = MessageBus(self._address, BusType.SYSTEM, negotiate_unix_fd=True)
            async with asyncio.timeout(ANSWER_S):
                self._bus = await bus.connect()
        except (OSError, EOFError, DBusFastError) as error:  # a missing bus, a wrong address, no admittance
            raise MachineSetupError(f"there is no bus to ask: {error}") from None
        self._loss = asyncio.create_task(self._await_loss(self._bus))
        try:
            self._bus.add_message_handler(self._receive)
            await self._call_bus("AddMatch", _RULE)
        except BaseException:
            await self._disconnect()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()
        if self._loss is not None:
            await self._loss

    async def hold_back_sleep(self, why: str) -> SleepLock:
        """Ask for time before each sleep; `systemd-inhibit --list` shows `why`.

        Raises:
            MachineSetupError: logind is not there or refused.
        """
        answer = await self._call(INTERFACE, "Inhibit", "ssss", ["sleep", "Stoker", why, "delay"])
        try:
            descriptor = answer.unix_fds[answer.body[0]]
        except (IndexError, TypeError):
            raise MachineSetupError("logind answered without a lock") from None
        os.set_inheritable(descriptor, False)  # a copy in an engine would go on holding the lock
        return SleepLock(descriptor)

    async def sleeps(self) -> AsyncGenerator[bool, None]:
        """True when the machine is about to sleep, False when it woke; ends when the bus is gone."""
        while (signal := await self._signals.get()) is not None:
            # A bus delivers what any client sends us directly, so the sender is checked, not only the name.
            try:
                owner = (await self._call_bus("GetNameOwner", SERVICE)).body[0]
            except MachineSetupError as error:
                log.debug("a signal of sleep by an unknown sender: %s", error)
                continue
            if signal.sender == owner:
                yield bool(signal.body[0])

    def _receive(self, message: Message) -> None:
        if (
            message.message_type is MessageType.SIGNAL
            and (message.path, message.interface, message.member) == (PATH, INTERFACE, SIGNAL)
            and message.signature == "b"
        ):
            if self._signals.full():
                log.warning("the bus sends signals of sleep faster than they can be read; one is dropped")
                return
            self._signals.put_nowait(message)

    async def _await_loss(self, bus: MessageBus) -> None:
        try:
            await bus.wait_for_disconnect()  # type: ignore[no-untyped-call]  # the library's gap
        except (OSError, EOFError, DBusFastError) as error:
            log.debug("the bus is gone: %s", error)
        while self._signals.full():
            self._signals.get_nowait()
        self._signals.put_nowait(None)

    async def _call_bus(self, member: str, argument: str) -> Message:
        message = Message(_BUS, _BUS_PATH, _BUS, member, signature="s", body=[argument])
        return await self._send(message)

    async def _call(self, interface: str, member: str, signature: str, body: list[str]) -> Message:
        return await self._send(Message(SERVICE, PATH, interface, member, signature=signature, body=body))

    async def _send(self, message: Message) -> Message:
        """The answer to a call. Raises MachineSetupError."""
        assert self._bus is not None, "used outside of its block"
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._bus.call(message)
        except (OSError, EOFError, DBusFastError) as error:
            raise MachineSetupError(f"{message.member} was not answered: {error or 'no answer'}") from None
        if answer.message_type is MessageType.ERROR:
            raise MachineSetupError(f"{message.member} was refused: {answer.error_name} {answer.body}")
        return answer
