"""What a gate asks of this machine: to go on with a request, and what it holds for the next.

Owns the beginnings of prompts that the machine has, as gates name them.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from stoker.client.requests.held_prefixes import HeldPrefixes
from stoker.client.requests.record import RequestRecord
from stoker.errors import NotReadyError
from stoker.ipc.events import Admitted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from stoker.client.requests.stream import StreamEvent
    from stoker.client.supervisor import EngineSupervisor
    from stoker.ipc.commands import Submit


class Handover:
    """See the module.

    Args:
        running: the supervisor; raises NotReadyError before the start.
        stream: runs a request, see `Client.stream`.
    """

    def __init__(
        self,
        running: Callable[[], EngineSupervisor],
        stream: Callable[[RequestRecord], AsyncGenerator[StreamEvent, None]],
    ) -> None:
        self._running = running
        self._stream = stream
        self._held = HeldPrefixes()

    def __repr__(self) -> str:
        return f"<Handover {self._held!r}>"

    async def take_over(self, submit: Submit, owner: str, route: str) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request from where another machine left it; as of `Runtime.stream` else.

        Args:
            submit: what was asked for, and what was delivered.
            owner: digest of the API key of the gate that gives it, which is trusted with its grammar.
            route: what it came by.
        """
        record = RequestRecord.handed_over(submit, time.monotonic(), owner, route)
        async with aclosing(self._stream(record)) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    self._held.note(submit.chain, self._running().num_restarts)
                yield event

    def held(self) -> bytes:
        """The newest beginnings that this machine has; `held_prefixes.unpacked` reads them."""
        try:
            return self._held.packed(self._running().num_restarts)
        except NotReadyError:  # nothing was started
            return b""
