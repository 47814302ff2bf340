"""What crosses the boundary between the front and the engine: commands go in, events come out.

Each message is a frozen, tagged msgspec.Struct; a frame on the wire is one msgpack list of them.
Nothing here knows how it is carried (see `stoker.client.process.transport`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.errors import ErrorInfo
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.values import (
    CacheSource,
    ModelInfo,
    ModelSpec,
    Tensor,
    Timings,
    TokenLogprob,
    Usage,
)

# ---------------------------------------------------------------- commands (front -> engine)


class KnowModel(msgspec.Struct, frozen=True, tag=True):
    """Serve `spec` from now on; it is loaded as soon as a request needs it.

    Attributes:
        is_suspect: its last load ended an engine: the next one is tried in a child process first.
    """

    spec: ModelSpec
    is_suspect: bool = False


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Serve `spec` and load it now; answered by `ModelState` events, last `ready`, `failed` or `absent`.

    The same file with the same settings is not loaded again (SPEC R5); another takes the place of the one of
    that id once it is in (SPEC L5).

    Attributes:
        may_evict: idle models may go for it; else it stays absent where it does not fit beside them.
        is_suspect: as in `KnowModel`.
    """

    spec: ModelSpec
    may_evict: bool = True
    is_suspect: bool = False


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """Free a model as soon as nothing runs on it, or stop loading it (SPEC R3).

    Answered by `ModelState` with `unloading` and `absent`. The model stays served: requests that come
    meanwhile have it loaded again. An unknown id is ignored.
    """

    model: str


class PinModel(msgspec.Struct, frozen=True, tag=True):
    """Never unload a model to make room, or no longer so (SPEC R3)."""

    model: str
    is_pinned: bool


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Stop at the next step, save what was computed for up to `save_s`, free everything, exit (SPEC L2).

    No request gets a terminal event: the front keeps them for the next engine. The last event is `Goodbye`.
    """

    save_s: float


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run a request. After a restart `generated` and `mirostat_mu` carry what was delivered of each choice.

    Attributes:
        generated: token ids delivered, one list a choice; empty for a new request.
        is_finished: for each choice, whether it has already ended (such a choice is not run again).
        mirostat_mu: sampler state after the last delivered token, one a choice.
        age_s: seconds since the caller submitted it (deadlines count from there).
        num_context: as in `Admitted`, of one that was admitted before; 0: it was not.
        is_paused: it enters paused and waits for `Resume`.
    """

    request_id: str
    request: GenerateRequest
    generated: list[list[int]] = []
    is_finished: list[bool] = []
    mirostat_mu: list[float | None] = []
    age_s: float = 0.0
    is_paused: bool = False
    num_context: int = 0


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Take a request out of its slot or the line until `Resume`; an unknown id is ignored (SPEC Q17).

    Answered by `Paused` for a request that was not paused before.
    """

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Let a paused request back in the line, before newcomers of its class; answered by `Resumed`."""

    request_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request; a finished or unknown id is ignored. The terminal event carries `cancelled`."""

    request_id: str


class Tokenize(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for the token ids of a text; answered by `Reply` with `{"tokens": [...], "pieces": [bytes]}`."""

    call_id: int
    model: str
    text: str
    add_special: bool = True
    parse_special: bool = True


class Detokenize(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for the text of token ids; answered by `Reply` with `{"text": str}`."""

    call_id: int
    model: str
    tokens: list[int]


class CountTokens(msgspec.Struct, frozen=True, tag=True):
    """Ask how many tokens a request's prompt has; answered by `Reply` with `{"num_tokens": int}`.

    Pictures count with the places they take. Nothing is computed.
    """

    call_id: int
    model: str
    request: GenerateRequest


TextQuestion = Tokenize | Detokenize | CountTokens
"""What the vocabulary of one model answers."""


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for an `EngineStatus`; answered by `Reply` with `{"status": ...}`."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop intake, drain for `drain_s`, cancel what is left, free everything, exit (SPEC L4)."""

    drain_s: float = 0.0


Command = (
    KnowModel
    | LoadModel
    | UnloadModel
    | PinModel
    | Submit
    | Cancel
    | Pause
    | Resume
    | TextQuestion
    | GetStatus
    | Suspend
    | Shutdown
)

# ---------------------------------------------------------------- events (engine -> front)


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
