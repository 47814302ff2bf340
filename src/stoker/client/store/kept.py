"""A request without a client, as it is shown."""

from __future__ import annotations

import msgspec


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs, or has ended, without a client.

    Attributes:
        names: what else it is known by: X-Request-Id, the answer's id.
        n: completions of its prompt.
        note: as in its request.
        owner: digest of the API key that made it; empty: it came without one.
        state: running or ended.
        num_tokens: generated so far, over all choices.
    """

    id: str
    names: list[str] = []
    is_chat: bool = False
    model: str = ""
    n: int = 1
    note: bytes = b""
    owner: str = ""
    state: str = "running"
    num_tokens: int = 0
