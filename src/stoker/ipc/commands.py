"""Commands from the client to the engine, each a frame of `ipc.codec`."""

from __future__ import annotations

import msgspec

from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest


class KnowModel(msgspec.Struct, frozen=True, tag=True):
    """Serve `spec` from now on; it is loaded once a request needs it.

    Attributes:
        is_suspect: its last load ended an engine: the next is tried in a child process first.
    """

    spec: ModelSpec
    is_suspect: bool = False


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Serve `spec` and load it now; answered by `ModelState` events, last `ready`, `failed` or `absent`.

    The same file with the same settings is not loaded again (SPEC R5); another one replaces the model of that
    id once it is ready (SPEC L5).

    Attributes:
        may_evict: idle models may be unloaded for it; else it stays absent where it does not fit beside them.
        is_suspect: as in `KnowModel`.
        ask_id: number of this command, which grows with each load or unload; `ModelState.answers` names it.
    """

    spec: ModelSpec
    may_evict: bool = True
    is_suspect: bool = False
    ask_id: int = 0


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """Free a model once nothing runs on it, or stop loading it (SPEC R3).

    Answered by `ModelState` with `unloading` and `absent`. The model stays served: a later request loads it
    again. An unknown id is ignored. `ask_id` as in `LoadModel`.
    """

    model: str
    ask_id: int = 0


class PinModel(msgspec.Struct, frozen=True, tag=True):
    """Set whether a model is never unloaded to make room (SPEC R3)."""

    model: str
    is_pinned: bool


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Stop at the next step, save what was computed for up to `save_s`, free everything, exit (SPEC L2).

    No request gets a terminal event: the client holds them for the next engine. The last event is `Goodbye`.
    """

    save_s: float


class LostDevices(msgspec.Struct, frozen=True, tag=True):
    """Devices that have ended engines, by id, and how often; sent before any load (SPEC R13)."""

    times: dict[str, int]


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run a request. After a restart `generated` and `mirostat_mu` carry what was delivered of each choice.

    Attributes:
        generated: token ids delivered, one list a choice; empty for a new request.
        is_finished: for each choice, whether it has ended and is not run again.
        mirostat_mu: sampler state after the last delivered token, one a choice.
        age_s: seconds since the caller submitted it (deadlines count from there).
        num_context: as in `Admitted`; 0: it was not admitted before.
        is_paused: it enters paused.
        made_for: `served_by` of the way to serve its model that it was made for; empty: there is one only.
        vocabulary: of that way; empty: not known.
        vocabulary_sample: as in `ModelInfo`, of what made the tokens delivered; empty: not known.
        chain: hashes of what the prompt begins with, by which a gate chose the machine; an engine ignores it.
    """

    request_id: str
    request: GenerateRequest
    generated: list[list[int]] = []
    is_finished: list[bool] = []
    mirostat_mu: list[float | None] = []
    age_s: float = 0.0
    is_paused: bool = False
    num_context: int = 0
    made_for: str = ""
    vocabulary: str = ""
    vocabulary_sample: str = ""
    chain: tuple[int, ...] = ()


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Take a request out of its slot or the queue until `Resume`; an unknown id is ignored (SPEC Q17).

    Answered by `Paused`, unless it was paused before.
    """

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Put a paused request back in the queue, before newcomers of its class; answered by `Resumed`."""

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

    An image counts with the tokens it takes. Nothing is computed.
    """

    call_id: int
    model: str
    request: GenerateRequest


TextQuestion = Tokenize | Detokenize | CountTokens
"""What the vocabulary of one model answers."""


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for an `EngineStatus`; answered by `Reply` with `{"status": ...}`."""

    call_id: int


class ExportState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write what is computed of a live request to a file of the disk tier's form, for another machine.

    Answered by `Reply` with `{"num_tokens": int, "size_bytes": int}`, the size of the file, or an error where
    there is nothing to be had. The request goes on.

    Attributes:
        path: of the file, which must not be there.
        max_bytes: the most that it may take, about.
    """

    call_id: int
    request_id: str
    path: str
    max_bytes: int


class ImportState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Store what a file of `ExportState` holds, for a request that is to go on from it.

    Answered by `Reply` with `{"num_tokens": int}`, or an error where it cannot be used.

    Attributes:
        request: whose beginning it is, as it will be submitted; its prompt is not looked at.
    """

    call_id: int
    request: GenerateRequest
    path: str


StateQuestion = ExportState | ImportState
"""What is asked of the engine that serves now, and of no other."""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Post the summaries of `ipc.figures` from now on, all of them once at first, or no longer."""

    is_watched: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests, finish for `drain_s`, cancel the rest, free everything, exit (SPEC L4)."""

    drain_s: float = 0.0


Command = (
    KnowModel
    | LoadModel
    | UnloadModel
    | PinModel
    | LostDevices
    | Submit
    | Cancel
    | Pause
    | Resume
    | TextQuestion
    | GetStatus
    | StateQuestion
    | Watch
    | Suspend
    | Shutdown
)
