"""What the engine tells the client. A frame on the wire is one msgpack list of these.

Each request ends with exactly one `Finished` or `Failed`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.errors import ErrorInfo
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource, Tensor, Timings, TokenLogprob, Usage


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is up and reads commands."""

    pid: int


class ModelState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A model moved (SPEC L1).

    Attributes:
        state: absent, downloading, loading, ready, suspended, failed or unloading.
        stage: of a load: "waiting" for room, "header", "weights"; of a download the file's name. With
            "ready": the model serves while another load of it, which may take its place, has come there.
        fraction: of the stage, 0 to 1.
        reason: why, for people; empty where somebody asked for it.
    """

    model: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    info: ModelInfo | None = None
    error: ErrorInfo | None = None
    reason: str = ""


class PressureMoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Memory pressure has changed (SPEC M3).

    Attributes:
        level: normal, warning or critical.
        fraction: of the worst source, 0 to 1 and more.
        source: footprint, system, cgroup, device, psi or event.
    """

    level: str
    fraction: float
    source: str


class RungTaken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rung of the ladder against memory pressure was taken, or left again (SPEC M4).

    Attributes:
        rung: its name.
        is_undone: what it had taken away is allowed again.
        freed_bytes: what it gave back, as far as that is counted.
    """

    rung: str
    is_undone: bool = False
    freed_bytes: int = 0


class HeatMoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The machine's heat has changed: nominal, fair, serious or critical (SPEC M6).

    `sensor` is the one that says so, `celsius` what it shows, where it shows degrees.
    """

    level: str
    sensor: str = ""
    celsius: float | None = None


MachineEvent = PressureMoved | RungTaken | HeatMoved
"""What happens to the machine; belongs to no request and no model."""


class Queued(msgspec.Struct, frozen=True, tag=True):
    """A request is in the line at `position` (0 is next); it may run in about `eta_s` seconds (SPEC Q14).

    Sent when it enters, and again when its position has changed, at most once a second.
    """

    request_id: str
    position: int
    eta_s: float | None = None


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """A request is handed to the worker that tokenises it; `Queued` or `Failed` says that this has ended.

    For the front, which charges crashes; no client sees it.
    """

    request_id: str


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A choice of the request got a slot; it will be in the next step.

    `cached_tokens` of the `prompt_tokens` were not computed for it, but came from `cache_source` (SPEC C13).
    A choice may come to hold `num_context` tokens: its model is not given less context before it has ended.
    """

    request_id: str
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    prompt_tokens: int = 0
    num_context: int = 0


class Parked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A choice gave its place to another and will go on later (SPEC Q4).

    `form` is how it is kept: cells, snapshot or tokens.
    """

    request_id: str
    index: int
    form: str
    reason: str


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Every open choice of the request stands still until `Resume`."""

    request_id: str


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """The paused request is in the line again."""

    request_id: str


class PrefillProgress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Prompt tokens: in all, taken from the cache, computed so far (cached included); ms since admission."""

    request_id: str
    total: int
    cached: int
    processed: int
    time_ms: float


class PromptEcho(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The prompt's text (`echo`) and logprobs (`prompt_logprobs`), once, before any delta."""

    request_id: str
    text: str
    logprobs: list[TokenLogprob] | None = None


class StateReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What `state_output` asked for (SPEC K5, D8), once, before the terminal event.

    Attributes:
        num_tokens: tokens the state has seen.
        tensors: a recurrent model's state by layer; of other models the last hidden state alone.
    """

    request_id: str
    num_tokens: int
    tensors: list[Tensor]


class Delta(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """What one step added to one choice.

    `token_ids` are all tokens drawn, `text` what the stop and UTF-8 gate let through (often less or nothing).
    The choice's last delta carries `finish_reason`. `stop_text` is the stop string that matched.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    mirostat_mu: float | None = None


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Terminal: every choice has ended."""

    request_id: str
    usage: Usage
    timings: Timings


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request ended with an error; deltas already delivered stand."""

    request_id: str
    error: ErrorInfo


class Reply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to a command that carried `call_id`."""

    call_id: int
    value: dict[str, Any] = {}
    error: ErrorInfo | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent every half second by a thread of its own while the engine lives.

    `step_s` is how long the running native step has taken (0: none), `step_limit_s` how long it may take.
    """

    step_s: float
    step_limit_s: float


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The last event of an orderly shutdown."""


RequestEvent = (
    Preparing
    | Queued
    | Admitted
    | Parked
    | Paused
    | Resumed
    | PrefillProgress
    | PromptEcho
    | StateReady
    | Delta
    | Finished
    | Failed
)
"""What happens to one request; each carries its `request_id`."""

Event = Hello | ModelState | MachineEvent | RequestEvent | Reply | Heartbeat | Goodbye
