"""What a call of several requests goes through, from the moves of its requests."""

from __future__ import annotations

import pytest

from stoker.client.requests.call_moves import CallMoves
from stoker.client.requests.moves import LOADING, MAX_MOVES, RequestMoves, ShownState
from stoker.ipc.events import Admitted, Parked, Preparing, Queued, Waiting


class Call:
    """A call whose requests move by events of an engine; each event takes a second."""

    def __init__(self) -> None:
        self.moves = CallMoves(0.0)
        self._members: dict[str, RequestMoves] = {}
        self._now = 0.0

    def begins(self, name: str) -> None:
        """Another request of it comes, which is being prepared."""
        self._members[name] = RequestMoves(1)
        self._all(name, ShownState.PREPARING, "")

    def all_are(self, state: ShownState, reason: str) -> None:
        """Each of its requests is there."""
        for name in self._members:
            self._all(name, state, reason)

    def _all(self, name: str, state: ShownState, reason: str) -> None:
        self._now += 1.0
        move = self._members[name].all_move(state, self._now, reason)
        assert move is not None
        self.moves.member_moved(name, self._members[name], move)

    def happens(self, name: str, event: Preparing | Queued | Waiting | Admitted | Parked) -> None:
        """The engine says that of one of its requests."""
        self._now += 1.0
        move = self._members[name].take(event, self._now)
        assert move is not None
        self.moves.member_moved(name, self._members[name], move)

    def ends(self, name: str) -> None:
        """One of its requests has ended."""
        del self._members[name]
        self.moves.member_ended(name)

    @property
    def story(self) -> list[tuple[str, str]]:
        """States, and why."""
        return [(move.state, move.reason) for move in self.moves.listed]


BEGINNING = [("preparing", ""), ("queued", "waits for the next step")]


@pytest.fixture
def call() -> Call:
    """Two requests of it are in the queue."""
    found = Call()
    for name in ("a", "b"):
        found.begins(name)
        found.happens(name, Queued(name, 0))
    return found


def admitted(name: str) -> Admitted:
    """It is computed."""
    return Admitted(name, 0, None, 4, reason="in a call of 1")


def waits(name: str, reason: str, by: str | None = None) -> Waiting:
    """It is not."""
    return Waiting(request_id=name, index=0, reason=reason, by=by)


def test_a_call_is_where_its_foremost_request_is(call: Call) -> None:
    """SPEC O20: one that is computed counts for all; that the others wait is no wait of the call."""
    assert call.story == BEGINNING
    call.happens("a", admitted("a"))
    call.happens("b", waits("b", "the call under way is full"))
    assert call.story == [*BEGINNING, ("prefill", "in a call of 1")]
    assert (call.moves.state, call.moves.waits_for) == ("prefill", "")


def test_between_two_of_its_requests_a_call_does_not_wait(call: Call) -> None:
    """SPEC O20: a thousand texts are one stay, not a thousand."""
    call.happens("a", admitted("a"))
    call.ends("a")
    call.begins("c")
    call.happens("c", Queued("c", 1))
    call.happens("b", admitted("b"))
    call.ends("b")
    call.happens("c", admitted("c"))
    assert [state for state, _ in call.story] == ["preparing", "queued", "prefill"]


def test_a_call_waits_when_a_request_of_it_does_and_none_is_computed(call: Call) -> None:
    """SPEC O20: with the reason, and who is named in it, so that other keys are not told."""
    call.happens("a", admitted("a"))
    call.ends("a")
    call.happens("b", waits("b", "x is computed first", by="x"))
    assert call.story[-1] == ("queued", "x is computed first")
    assert (call.moves.listed[-1].by, call.moves.waits_for) == ("x", "x is computed first")
    call.happens("b", admitted("b"))
    call.happens("b", Parked(request_id="b", index=0, form="cells", reason="gave its slot to y", by="y"))
    assert (call.moves.state, call.moves.listed[-1].by) == ("parked", "y")


def test_the_reason_is_that_of_the_first_which_waits(call: Call) -> None:
    """SPEC O20: each new reason of it is a move, those of requests behind it are none."""
    call.happens("b", waits("b", "no free cells"))
    assert call.story == BEGINNING
    call.happens("a", waits("a", "no free slot"))
    assert call.story == [*BEGINNING, ("queued", "no free slot")]
    call.happens("a", Queued("a", 0, awaits_model=True))
    assert call.story[-1] == ("queued", LOADING)


def test_the_last_moves_are_kept_and_all_are_counted() -> None:
    """SPEC O20: of a request that is parked again and again."""
    moves = RequestMoves(1)
    for number in range(MAX_MOVES + 6):
        moves.all_move(ShownState.QUEUED, float(number), f"reason {number}")
    assert (len(moves.listed), moves.num_moves) == (MAX_MOVES, MAX_MOVES + 6)
    assert moves.listed[0].reason == "reason 6"


def test_an_engine_that_goes_holds_the_call_when_it_has_none_of_it(call: Call) -> None:
    """SPEC O20, L3: and the next one goes on."""
    call.happens("a", admitted("a"))
    call.all_are(ShownState.HELD, "the engine is restarting")
    assert call.story[-1] == ("held", "the engine is restarting")
    call.all_are(ShownState.PREPARING, "the engine was restarted")
    assert call.story[-1][0] == "preparing"
    call.happens("b", admitted("b"))
    assert [state for state, _ in call.story[-3:]] == ["held", "preparing", "prefill"]
