"""Whether one more request may wait: counts and the pace of ends, no engine, no clock."""

from __future__ import annotations

import msgspec
import pytest
from scripted_engine import request

from stoker.client.requests.record import RequestRecord
from stoker.client.requests.replay import Replay
from stoker.client.requests.requests import MAX_RETRY_S, Admission, num_waiting
from stoker.client.requests.table import RequestTable
from stoker.errors import QueueFullError
from stoker.ipc.events import Admitted, Delta, Parked, Paused, Queued
from stoker.ipc.request import FinishReason, GenerateRequest, Priority

PERSON = request()
JOB = msgspec.structs.replace(PERSON, priority=Priority.BACKGROUND)


def replay_of(*request_ids: str, asked: GenerateRequest = PERSON) -> Replay:
    """A replay with requests that an engine has in its line."""
    replay = Replay(RequestTable())
    for request_id in request_ids:
        replay.add(RequestRecord(request_id, asked, 0.0))
    replay.release(0.0)
    for request_id in request_ids:
        replay.record(Queued(request_id, 0))
    return replay


def admit(replay: Replay, *request_ids: str) -> None:
    """The engine gives all choices of these a slot."""
    for live in replay:
        if live.request_id in request_ids:
            for index in range(live.request.n):
                replay.record(Admitted(live.request_id, index=index))


def park(replay: Replay, request_id: str, index: int = 0) -> None:
    """The engine takes the slot of a choice."""
    replay.record(Parked(request_id=request_id, index=index, form="cells", reason="interactive"))


def waiting(replay: Replay, num_slots: int = 0) -> int:
    """How many wait for the model that all of them ask for."""
    return num_waiting(replay, "m", num_slots)


def retry_after_s(admission: Admission, now: float, *, num_over: int = 1) -> float:
    """What a person is told who is refused for so many too many, in a line for one."""
    with pytest.raises(QueueFullError) as caught:
        admission.check(PERSON, num_over, now)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_held_sent_and_queued_requests_wait() -> None:
    """Q11: whatever has no slot yet, wherever it is."""
    replay = replay_of("queued", "admitted")
    admit(replay, "admitted")
    replay.add(RequestRecord("sent", PERSON, 0.0))
    replay.release(0.0)
    replay.add(RequestRecord("held", PERSON, 0.0))
    assert waiting(replay) == 3


def test_parked_requests_do_not_wait_and_paused_ones_keep_their_places() -> None:
    """Q11, Q17: else pausing would be a way round the bound."""
    replay = replay_of("parked", "paused", "held")
    admit(replay, "parked", "paused")
    park(replay, "parked")
    for request_id in ("paused", "held"):
        live = replay._table.find(request_id)
        assert live is not None
        replay.pause(live)
    replay.record(Paused("paused"))
    assert waiting(replay) == 2


def test_free_slots_take_waiting_requests_at_once() -> None:
    """Q11: as many as choices with a slot leave over; an ended choice leaves its own."""
    replay = replay_of("a", "b", "c", "d", asked=request(n=2))
    admit(replay, "a")
    assert [waiting(replay, num_slots) for num_slots in (0, 2, 4, 9)] == [3, 3, 1, 0]
    replay.record(Delta(request_id="a", index=0, finish_reason=FinishReason.STOP))
    assert waiting(replay, 2) == 2
    park(replay, "a", 1)
    assert waiting(replay, 2) == 1
    admit(replay, "a")
    assert waiting(replay, 2) == 2


def test_each_model_has_its_own_line() -> None:
    """Q11, Q13: requests of another one do not count."""
    replay = replay_of("a", "b")
    replay.add(RequestRecord("other", msgspec.structs.replace(PERSON, model="x"), 0.0))
    assert (waiting(replay), num_waiting(replay, "x", 0)) == (2, 1)


@pytest.mark.parametrize(("asked", "bound"), [(PERSON, 6), (JOB, 3)])
def test_background_is_refused_first(asked: GenerateRequest, bound: int) -> None:
    """Q11: at half of the bound; the error carries both numbers."""
    admission = Admission(6)
    admission.check(asked, bound - 1, 0.0)
    with pytest.raises(QueueFullError) as caught:
        admission.check(asked, bound, 0.0)
    assert caught.value.details == {"num_waiting": bound, "max_queue": bound}


def test_a_line_for_one_takes_one_of_either_class() -> None:
    """Q11: half of one is one."""
    Admission(1).check(JOB, 0, 0.0)


def test_retry_after_follows_the_pace_of_ends() -> None:
    """Q11: a mean of the intervals, newest first in weight; a second at least."""
    admission = Admission(1)
    for _ in range(20):
        admission.arrived("m", 0.0)
    assert retry_after_s(admission, 0.0) == 1.0
    for end in range(1, 11):
        admission.ended("m", 4.0 * end)
    assert retry_after_s(admission, 40.0) == pytest.approx(4.0)
    for _ in range(9):
        admission.ended("m", 40.0)
    assert retry_after_s(admission, 40.0) == 1.0


def test_retry_after_counts_those_before_the_refused_one() -> None:
    """Q11: three places too many take three ends, up to a bound on what is promised."""
    admission = Admission(1)
    admission.arrived("m", 0.0)
    admission.arrived("m", 0.0)
    admission.ended("m", 4.0)
    assert retry_after_s(admission, 4.0, num_over=3) == pytest.approx(12.0)
    assert retry_after_s(admission, 4.0, num_over=900) == MAX_RETRY_S


def test_a_long_silence_makes_retry_after_longer() -> None:
    """Q11: where nothing has ended for long, the next end is not a moment away."""
    admission = Admission(1)
    admission.arrived("m", 10.0)
    assert retry_after_s(admission, 40.0) == pytest.approx(30.0)


def test_an_idle_time_says_nothing_of_the_pace() -> None:
    """Q11: the clock of the pace stands while nothing is there to end."""
    admission = Admission(1)
    for start in (0.0, 5000.0):
        admission.arrived("m", start)
        admission.ended("m", start + 2.0)
    admission.arrived("m", 9000.0)
    assert retry_after_s(admission, 9000.0) == pytest.approx(2.0)
