"""The bodies of POST /v1/runtime/models/... and /v1/runtime/suspend (SPEC I2, I4)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from stoker.server.inbound.body import Body, Name
from stoker.settings import MAX_SLOTS

MAX_REASON_CHARS = 64
MAX_GRACE_S = 86_400.0


class ModelRequest(Body):
    """A model to unload, by the id it is served under."""

    model: Name


class LoadModelRequest(ModelRequest):
    """A model to load: a served one, one that `stoker models` lists, or OWNER/REPO[:FILE] of a hub.

    Attributes:
        keep_alive: seconds, or such as `10m`, that it stays after its last request; negative: for good.
        ctx_size: tokens that all its slots share.
        slots: requests that run on it at once.
    """

    keep_alive: float | str | None = None
    ctx_size: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, validation_alias=AliasChoices("ctx_size", "ctx", "n_ctx")
    )
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] | None = Field(
        None, validation_alias=AliasChoices("slots", "num_slots")
    )


class PinModelRequest(ModelRequest):
    """A model to keep in memory whatever else needs room, or no longer so."""

    pinned: bool = True


class SuspendRequest(Body):
    """Why, and after how many seconds; null: what the reason and the settings say (SPEC L2)."""

    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_CHARS)] = "request"
    grace_s: Annotated[float, Field(ge=0, le=MAX_GRACE_S)] | None = None
