"""What crosses the boundary between the front and the engine: commands go in, events come out.

Each message is a frozen, tagged msgspec.Struct; a frame on the wire is one msgpack list of them.
Nothing here knows how it is carried (see `stoker.engine.carrier`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from stoker.errors import ErrorInfo
from stoker.request import FinishReason, GenerateRequest

# ---------------------------------------------------------------- values


class Policy(StrEnum):
    """How a step is shared between those who decode and those who prefill (SPEC Q9).

    `latency` keeps a step within the target while an interactive request decodes, `balanced` within three
    times the target, `throughput` leaves prefill three quarters of the token budget.
    """

    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


class CacheMode(StrEnum):
    """What is kept of finished work (SPEC C10): nothing, cells, snapshots in memory and on disk, or both."""

    OFF = "off"
    LIVE = "live"
    SNAPSHOT = "snapshot"
    BOTH = "live+snapshot"

    @property
    def keeps_cells(self) -> bool:
        """Whether cells are shared and kept for reuse."""
        return self in {CacheMode.LIVE, CacheMode.BOTH}

    @property
    def keeps_snapshots(self) -> bool:
        """Whether states are kept as bytes."""
        return self in {CacheMode.SNAPSHOT, CacheMode.BOTH}


class CacheSource(StrEnum):
    """Where a request's cached tokens came from (SPEC C13).

    Cells of an ended request, a snapshot in host memory or on disk, or cells of a request that still ran.
    """

    LIVE = "live"
    RAM = "ram"
    DISK = "disk"
    SHARED = "shared"


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to load and how.

    Attributes:
        id: the name it is served under.
        path: the GGUF file; "fake:" selects the deterministic FakeBackend.
        num_slots: sequences that may run at once.
        n_ctx: KV cells all slots share, and the most one request may use; 0: the model's own.
        n_batch: tokens one step may carry.
        num_threads: 0 picks the number of physical cores, the most that the engine will use.
        policy: how steps are shared between decode and prefill (SPEC Q9).
        target_step_ms: how long a step may take while an interactive request decodes (SPEC Q8).
        background_patience_s: how long background work may go without a step (SPEC Q7).
        park_bytes: host memory that states of parked requests may take (SPEC Q4).
        cache_mode: what is kept of finished work (SPEC C10).
    """

    id: str
    path: str
    num_slots: int = 8
    n_ctx: int = 16384
    n_batch: int = 512
    num_threads: int = 0
    max_queue: int = 512
    policy: Policy = Policy.LATENCY
    target_step_ms: float = 50.0
    background_patience_s: float = 30.0
    park_bytes: int = 2**30
    cache_mode: CacheMode = CacheMode.BOTH


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is and the limits that resulted (SPEC K7)."""

    id: str
    path: str
    label: str
    model_class: str
    architecture: str
    description: str
    num_params: int
    size_bytes: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_batch: int
    num_slots: int
    num_threads: int
    kv_type: str
    flash_attention: str
    memory_bytes: dict[str, int]
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    can_trim: bool = True
    can_fork: bool = True
    has_vision: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its natural-log probability under the raw logits.

    `top` holds (token id, bytes, logprob) best first, as many as were asked for.
    A first prompt token has logprob None.
    """

    token_id: int
    token_bytes: bytes
    logprob: float | None
    top: list[tuple[int, bytes, float]]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, over all its choices.

    Attributes:
        cached_tokens: prompt tokens that were not computed for this request.
        cache_source: where they came from; None: there were none.
        dropped_tokens: what a context shift dropped (SPEC C12).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    dropped_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a request spent (SPEC O2), as the engine saw it, and how often others took its place.

    `decode_s` is from the first token to the end, time spent parked included.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A named array of little-endian float32, row-major."""

    name: str
    shape: tuple[int, ...]
    data: bytes


# ---------------------------------------------------------------- commands (front -> engine)


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Load `spec`; answered by `ModelState` events, last `ready` or `failed`."""

    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """Free a model; its requests are cancelled."""

    model: str


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run a request. After a restart `generated` and `mirostat_mu` carry what was delivered of each choice.

    Attributes:
        generated: token ids delivered, one list a choice; empty for a new request.
        is_finished: for each choice, whether it has already ended (such a choice is not run again).
        mirostat_mu: sampler state after the last delivered token, one a choice.
        age_s: seconds since the caller submitted it (deadlines count from there).
        is_paused: it enters paused and waits for `Resume`.
    """

    request_id: str
    request: GenerateRequest
    generated: list[list[int]] = []
    is_finished: list[bool] = []
    mirostat_mu: list[float | None] = []
    age_s: float = 0.0
    is_paused: bool = False


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


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for an `EngineStatus`; answered by `Reply` with `{"status": ...}`."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop intake, drain for `drain_s`, cancel what is left, free everything, exit (SPEC L4)."""

    drain_s: float = 0.0


Command = (
    LoadModel | UnloadModel | Submit | Cancel | Pause | Resume | Tokenize | Detokenize | GetStatus | Shutdown
)

# ---------------------------------------------------------------- events (engine -> front)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is up and reads commands."""

    pid: int


class ModelState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A model moved: `state` is loading, ready, failed, unloading or absent (SPEC L1)."""

    model: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    info: ModelInfo | None = None
    error: ErrorInfo | None = None


class Queued(msgspec.Struct, frozen=True, tag=True):
    """A request is in the line at `position` (0 is next); it may run in about `eta_s` seconds (SPEC Q14).

    Sent when it enters, and again when its position has changed, at most once a second.
    """

    request_id: str
    position: int
    eta_s: float | None = None


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A choice of the request got a slot; it will be in the next step.

    `cached_tokens` of the request's prompt were not computed for it, but came from `cache_source` (SPEC C13).
    """

    request_id: str
    cached_tokens: int = 0
    cache_source: CacheSource | None = None


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


Event = (
    Hello
    | ModelState
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
    | Reply
    | Heartbeat
    | Goodbye
)

RequestEvent = (
    Queued
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
