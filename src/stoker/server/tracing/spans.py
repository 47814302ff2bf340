"""The spans of a request, from what it went through. Pure: nothing of OpenTelemetry's library is needed.

Names of attributes are those of its semantic conventions for generative AI (`gen_ai.*`), and of our own
(`stoker.*`) for what these do not name. No text of a request, nor of an error, which may quote one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.ipc.status import CallKind
from stoker.server.tracing.intervals import intervals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import RequestStatus
    from stoker.server.tracing.intervals import Interval

    Attribute = str | int | float | bool | tuple[str, ...]
    Attributes = Mapping[str, Attribute]

PROVIDER = "stoker"
_OPERATIONS = {"chat": "chat", "completion": "text_completion", CallKind.EMBED: "embeddings"}
"""By kind; other kinds have no name in the conventions and keep their own."""
_NAMES = {
    "held": "held",
    "preparing": "prepare",
    "queued": "queue",
    "prefix_wait": "prefix wait",
    "prefill": "prefill",
    "decode": "decode",
    "parked": "parked",
    "paused": "paused",
}
"""Of a span by the state; a state that is not here is no span."""
REPLAYED = "replayed"
_RESTARTED = "the engine was restarted"
"""How the reason of a move begins with which a next engine gets a request."""


@dataclass(frozen=True, slots=True)
class SpanData:
    """A span and those below it; times in seconds since the epoch.

    Attributes:
        error_code: why it failed; empty: it did not.
    """

    name: str
    begun_at: float
    ended_at: float
    attributes: Attributes
    error_code: str = ""
    children: Sequence[SpanData] = field(default=())


def asked_attributes(request: GenerateRequest) -> dict[str, Attribute]:
    """What a request asks for, but for its text."""
    sampling = request.sampling
    found: dict[str, Attribute | None] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": request.n if request.n != 1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def spans_of(ended: RequestStatus, asked: Attributes) -> SpanData:
    """The span of a request that has ended, with one below it for each of its states.

    Args:
        ended: with its moves.
        asked: from `asked_attributes`; empty: not known.
    """
    operation = _OPERATIONS.get(ended.kind, ended.kind)
    # A sum of floats may be some nanoseconds before the last move, which no span may end before.
    ended_at = max([ended.arrived_at + ended.end_to_end_s, *(move.at for move in ended.moves)])
    return SpanData(
        name=f"{operation} {ended.model}",
        begun_at=ended.arrived_at,
        ended_at=ended_at,
        attributes={**asked, **_attributes(ended, operation)},
        error_code=ended.error.code if ended.error else "",
        children=[_span(each) for each in intervals(ended.moves, ended_at) if each.move.state in _NAMES],
    )


def _attributes(ended: RequestStatus, operation: str) -> dict[str, Attribute]:
    gaps = ended.itl_ms
    found: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.request.max_tokens": ended.max_tokens,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(ended.finish_reason.split(", "))
        if ended.finish_reason
        else None,
        "gen_ai.response.time_to_first_chunk": ended.first_token_s,
        "error.type": ended.error.code if ended.error else None,
        "http.route": ended.route if ended.route.startswith("/") else None,
        "stoker.priority": str(ended.priority),
        "stoker.queue_s": ended.queue_s,
        "stoker.num_parks": ended.num_parks,
        "stoker.parked_s": ended.parked_s,
        "stoker.num_restarts": ended.num_restarts,
        "stoker.cache_source": ended.cache_source,
        "stoker.itl_p50_ms": gaps.p50 if gaps else None,
        "stoker.itl_p99_ms": gaps.p99 if gaps else None,
        "stoker.num_members": ended.num_members,
        "stoker.num_moves_left_out": ended.num_moves - len(ended.moves) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _span(interval: Interval) -> SpanData:
    move = interval.move
    found: dict[str, Attribute | None] = {
        "stoker.reason": move.reason or None,
        "stoker.by": move.by,
        "stoker.slot": move.slot,
        "stoker.choice": move.index,
    }
    name = REPLAYED if move.reason.startswith(_RESTARTED) else _NAMES[move.state]
    known = {attribute: value for attribute, value in found.items() if value is not None}
    return SpanData(name, move.at, interval.ended_at, known)
