"""The seam to a machine: what the gate asks of one, however it is reached.

`http_peer` reaches a Stoker server; another transport is another class of this shape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from stoker.ipc.status import RuntimeStatus
from stoker.remote.wire import Overview

if TYPE_CHECKING:
    from stoker.errors import StokerError
    from stoker.ipc.commands import Submit, TextQuestion
    from stoker.ipc.events import RequestEvent
    from stoker.ipc.request import GenerateRequest


class PeerLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine says of itself.

    Attributes:
        overview: its models, and whether it takes requests.
        status: its engine and everything that it holds.
    """

    overview: Overview
    status: RuntimeStatus


OnEvents = Callable[[list["RequestEvent"]], None]
"""Gets the events of one request that came together; the last of all is `Finished` or `Failed`."""
OnEnd = Callable[["StokerError | None"], None]
"""Called once: None behind the terminal event, else why there is none."""


class PeerRun(Protocol):
    """A request on a machine."""

    @property
    def silent_s(self) -> float:
        """Seconds since the machine said anything of it."""
        ...

    def abandon(self) -> None:
        """Leave it: the machine cancels it, and nothing of it is told any more. Idempotent."""
        ...


class MovingState(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has computed of a request, on its way.

    Attributes:
        num_tokens: that it stands for.
        size_bytes: of all parts together.
        parts: its bytes, to be read once.
    """

    num_tokens: int
    size_bytes: int
    parts: AsyncIterator[bytes]


@runtime_checkable
class CarriesStates(Protocol):
    """A link that can do this too; one that is none moves requests as tokens alone."""

    def state_of(self, request_id: str) -> AbstractAsyncContextManager[MovingState]:
        """What is computed of a request there, which goes on; read while the block runs.

        Raises StokerError: there is none, or the machine does not answer.
        """
        ...

    async def take_state(self, request: GenerateRequest, state: MovingState) -> int:
        """Have the machine store it, for that request (without its prompt); returns its tokens.

        Raises StokerError: it cannot be used there.
        """
        ...


class PeerLink(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """By which the site knows it."""
        ...

    @property
    def url(self) -> str:
        """Where it is, for people."""
        ...

    def take_key(self, other: PeerLink) -> None:
        """Be let in from now on as the other would be, which reaches the same machine; what runs goes on."""
        ...

    async def look(self) -> PeerLook:
        """How it is now. Raises StokerError: it does not answer, or lets nobody in."""
        ...

    def run(self, submit: Submit, on_events: OnEvents, on_end: OnEnd) -> PeerRun:
        """Run a request from the tokens that it has; both are called later, on the event loop."""
        ...

    async def ask(self, question: TextQuestion) -> dict[str, Any]:
        """The answer of a model's vocabulary. Raises StokerError."""
        ...

    async def steer(self, request_id: str, action: str) -> None:
        """Pause or resume a request. Raises StokerError."""
        ...

    async def operate(self, action: str, body: dict[str, Any]) -> None:
        """Load, unload or pin a model. Raises StokerError."""
        ...

    async def close(self) -> None:
        """Abandon everything and disconnect."""
        ...
