"""What `/metrics` shows of live requests: where they are, and why they wait.

Reasons are sentences and name requests; here they become few words that a metric can have as a label.
"""

from __future__ import annotations

import collections
from enum import StrEnum
from typing import TYPE_CHECKING

from stoker.ipc.request import Priority
from stoker.server.metrics.families import gauge, gauges
from stoker.server.metrics.served import slots_by_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from stoker.ipc.status import GroupStatus, RequestStatus
    from stoker.runtime import RuntimeStatus

    _Row = tuple[RequestStatus | GroupStatus, str]

_RUNNING = frozenset({"prefill", "decode"})
REQUEST_STATES = (
    "held",
    "preparing",
    "queued",
    "prefix_wait",
    "prefill",
    "decode",
    "parked",
    "paused",
)
"""Where a live request, or call of several, can be."""


class WaitCause(StrEnum):
    """Why a request does not compute."""

    SLOT = "slot"
    CELLS = "cells"
    PREFIX = "prefix"
    DISK = "disk"
    MODEL = "model"
    MEMORY = "memory"
    HEAT = "heat"
    PAUSED = "paused"
    ENGINE = "engine"
    PREPARATION = "preparation"
    OTHER = "other"


_BY_STATE = {
    "prefix_wait": WaitCause.PREFIX,
    "paused": WaitCause.PAUSED,
    "held": WaitCause.ENGINE,
    "preparing": WaitCause.PREPARATION,
}
_BY_WORDS = {
    "disk": WaitCause.DISK,
    "slot": WaitCause.SLOT,
    "cells": WaitCause.CELLS,
    "prefix": WaitCause.PREFIX,
    "its model": WaitCause.MODEL,
    "memory": WaitCause.MEMORY,
    "heat": WaitCause.HEAT,
    "call under way": WaitCause.SLOT,
    "computed first": WaitCause.SLOT,
}
"""Words of the reasons that the engine gives, in the order in which they are looked for."""


def wait_cause(state: str, reason: str) -> WaitCause:
    """The cause that a state and a reason in words stand for; reasons that are not known are `other`."""
    if state in _BY_STATE:
        return _BY_STATE[state]
    return next((cause for words, cause in _BY_WORDS.items() if words in reason), WaitCause.OTHER)


def live_requests(status: RuntimeStatus) -> Iterable[Metric]:
    """Sequences and requests by where they are."""
    engine = status.engine
    running = sum(slot.state in _RUNNING for slot in engine.slots)
    yield gauge("num_requests_running", "Sequences in a slot.", running)
    yield gauge("num_requests_waiting", "Sequences in the queue.", len(engine.queue))
    yield gauge("num_requests_parked", "Sequences preempted.", len(engine.parked))
    yield gauge("num_requests_paused", "Sequences paused.", len(engine.paused))
    rows: list[_Row] = [(one, one.state) for one in status.requests]
    rows += [(one, one.moves[-1].state if one.moves else one.state) for one in status.groups]
    live = collections.Counter((str(one.priority), state) for one, state in rows)
    values = {
        (str(priority), state): float(live[priority, state])
        for priority in Priority
        for state in REQUEST_STATES
    }
    text = "Live requests, and calls of several, by class and state."
    yield gauges("requests_live", text, ["priority", "state"], values)
    reasons = collections.Counter(wait_cause(state, one.waits_for) for one, state in rows if one.waits_for)
    causes = {(str(cause),): float(reasons[cause]) for cause in WaitCause}
    yield gauges(
        "requests_waiting_for", "Live requests and calls that do not compute, by why.", ["cause"], causes
    )
    etas = {(str(priority),): _longest_eta_s(rows, priority) for priority in Priority}
    yield gauges("longest_eta_seconds", "Of those that wait for a slot.", ["priority"], etas)
    yield slots_by_state(engine.slots)


def _longest_eta_s(rows: list[_Row], priority: Priority) -> float:
    """Seconds until the last of the queue runs; 0: nobody waits, or no estimate is known."""
    etas = [one.eta_s for one, state in rows if one.priority == priority and state == "queued"]
    return max((eta_s for eta_s in etas if eta_s is not None), default=0.0)
