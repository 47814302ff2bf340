"""Events from the engine to the client; a frame of `ipc.codec` is a list of them.

Each request ends with exactly one `Finished` or `Failed`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stoker.errors import ErrorInfo
from stoker.ipc.figures import Figures
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource, Tensor, Timings, TokenLogprob, Usage

_WORDS = re.compile(r"(?<!^)(?=[A-Z])")


def event_name(kind: type) -> str:
    """The name of an event for others than this package: `prefill_progress` for PrefillProgress."""
    return _WORDS.sub("_", kind.__name__).lower()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is up and reads commands."""

    pid: int


class ModelState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A model moved (SPEC L1).

    Attributes:
        state: absent, downloading, loading, ready, suspended, failed or unloading.
        stage: of a load: "waiting" for memory, "header", "weights"; of a download the file's name. With
            "ready": the model serves while another load of it, which may replace it, is in this stage.
        fraction: of the stage, 0 to 1.
        num_bytes: of the file of a download; 0: not known.
        reason: why, for people; empty where it was asked for. Of a model that is ready why this backend
            serves it, where another comes before.
        path, backend: of a load, the way that it is tried; empty: not known.
        answers: `ask_id` of the last load or unload of the model, in each state from its end or refusal on;
            0: there was none, or it is under way.
    """

    model: str
    state: str
    path: str = ""
    backend: str = ""
    stage: str = ""
    fraction: float = 0.0
    num_bytes: int = 0
    info: ModelInfo | None = None
    error: ErrorInfo | None = None
    reason: str = ""
    answers: int = 0


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
        is_undone: it was left again.
        freed_bytes: what it freed, as far as that is counted.
    """

    rung: str
    is_undone: bool = False
    freed_bytes: int = 0


class HeatMoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The machine's heat has changed: nominal, fair, serious or critical (SPEC M6).

    `sensor` is the one that decided, `celsius` its value where it has one.
    """

    level: str
    sensor: str = ""
    celsius: float | None = None


MachineEvent = PressureMoved | RungTaken | HeatMoved
"""About the machine, not about a request or a model."""


class Queued(msgspec.Struct, frozen=True, tag=True):
    """A request is in the queue at `position` (0 is next) and may run in about `eta_s` seconds (SPEC Q14).

    Sent when it enters, and when its position or its estimate has changed, at most once a second.
    `awaits_model`: it waits for its model, and is prepared once that is loaded; else it was prepared.
    """

    request_id: str
    position: int
    eta_s: float | None = None
    awaits_model: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Why a queued choice does not run has changed. For status alone: its own client is not shown it.

    Attributes:
        index: which choice.
        reason: for people, such as "no free slot".
        by: the request that it waits for and that `reason` names; None: it names none.
        is_for_prefix: `by`, or its first choice, computes its beginning (SPEC C4).
    """

    request_id: str
    index: int
    reason: str
    by: str | None = None
    is_for_prefix: bool = False


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """A worker tokenises a request that has waited for its model, until `Queued` or `Failed`.

    One that is new is tokenised as soon as it comes, without this. For charging crashes; not passed on.
    """

    request_id: str


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A choice of the request has a slot and is in the next step.

    `cached_tokens` of the `prompt_tokens` came from `cache_source` (SPEC C13). A choice may grow to
    `num_context` tokens: its model is not reloaded with less context before the request has ended.
    `index` is the choice, `slot` its slot (None: it is computed without one), `reason` what it goes on from.
    """

    request_id: str
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    prompt_tokens: int = 0
    num_context: int = 0
    index: int = 0
    slot: int | None = None
    reason: str = ""


class Parked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A choice was preempted and goes on later (SPEC Q4), kept as `form`: cells, snapshot or tokens.

    `by` is the request that it gave way to, which `reason` names; None: it gave way to none.
    """

    request_id: str
    index: int
    form: str
    reason: str
    by: str | None = None


class Paused(msgspec.Struct, frozen=True, tag=True):
    """No open choice of the request goes on before `Resume`."""

    request_id: str


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """The paused request is in the queue again."""

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
        num_tokens: tokens that the state is of.
        tensors: a recurrent model's state by layer; of other models the last hidden state alone.
    """

    request_id: str
    num_tokens: int
    tensors: list[Tensor]


class Delta(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """What one step added to one choice.

    `token_ids` are all tokens drawn, `text` what is certain of it: no part of a stop string, no half
    character. The choice's last delta carries `finish_reason`; `stop_text` is the stop string that matched.
    Where a step gave several tokens there is a delta of each, and `pause_s` is what a reader waits between
    one and the next, in seconds, so that the text flows; nothing newer waits for that.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    mirostat_mu: float | None = None
    pause_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Terminal: every choice has ended."""

    request_id: str
    usage: Usage
    timings: Timings


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request ended with an error; deltas already delivered stay valid."""

    request_id: str
    error: ErrorInfo


class Reply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to a command that carried `call_id`."""

    call_id: int
    value: dict[str, Any] = {}
    error: ErrorInfo | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent every half second by a thread of its own.

    `step_s` is how long the native step under way has taken (0: none), `step_limit_s` how long it may take.
    """

    step_s: float
    step_limit_s: float


class Logged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A record of the engine process's log, on its way to the client's.

    Attributes:
        logger: name of the logger, always one below "stoker".
        level: as in `logging`.
        at: seconds since the epoch.
        text: the message, with the traceback if there is one.
    """

    logger: str
    level: int
    at: float
    text: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The last event of an orderly shutdown."""


RequestEvent = (
    Preparing
    | Waiting
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
"""About one request; each carries its `request_id`."""

Event = Hello | ModelState | MachineEvent | Figures | RequestEvent | Reply | Heartbeat | Logged | Goodbye
