"""What a restart replays, and whom a crash is charged to: no engine, no clock."""

from __future__ import annotations

import pytest
from scripted_engine import request

from stoker.engine.death import Death
from stoker.engine.replay import MAX_CHARGES, Replay
from stoker.errors import EngineCrashedError, InvalidRequestError, QueueFullError
from stoker.messages import (
    Admitted,
    Delta,
    Failed,
    Finished,
    PrefillProgress,
    PromptEcho,
    Queued,
    Submit,
    Timings,
    Usage,
)
from stoker.request import FinishReason

CRASH = Death("crashed", is_blamable=True)
KILL = Death("killed", is_blamable=False)


def replay_of(*request_ids: str, n: int = 1) -> Replay:
    """A replay with requests that an engine has admitted."""
    replay = Replay()
    for request_id in request_ids:
        replay.add(request_id, request(n=n), 0.0)
    replay.release(0.0)
    admit(replay, *request_ids)
    return replay


def admit(replay: Replay, *request_ids: str) -> None:
    """The engine admits these."""
    for request_id in request_ids:
        replay.record(Queued(request_id, 0))
        replay.record(Admitted(request_id))


def token(request_id: str, *tokens: int, index: int = 0, mu: float | None = None) -> Delta:
    """The engine delivers these tokens."""
    return Delta(request_id=request_id, index=index, token_ids=list(tokens), mirostat_mu=mu)


def given(replay: Replay) -> list[str]:
    """Whom the engine may have now."""
    return [submit.request_id for submit in replay.release(0.0)]


def test_a_replayed_request_carries_all_that_was_delivered_of_each_choice() -> None:
    """L3: tokens, ended choices, mirostat's state and the age that its deadline counts from."""
    replay = replay_of("a", n=2)
    replay.record(token("a", 1, 2, mu=3.5))
    replay.record(token("a", 7, index=1, mu=4.5))
    replay.record(
        Delta(request_id="a", index=1, token_ids=[8], finish_reason=FinishReason.STOP, mirostat_mu=5.0)
    )
    assert replay.bury(KILL) == []
    assert replay.release(9.0) == [
        Submit(
            request_id="a",
            request=request(n=2),
            generated=[[1, 2], [7, 8]],
            is_finished=[False, True],
            mirostat_mu=[3.5, 5.0],
            age_s=9.0,
        )
    ]


def test_a_request_that_no_engine_accepted_is_submitted_as_new() -> None:
    """Q11: only what had a place in the line before keeps it."""
    replay = Replay()
    replay.add("a", request(), 0.0)
    replay.release(0.0)
    replay.bury(KILL)
    assert replay.release(1.0) == [Submit(request_id="a", request=request(), age_s=1.0)]


def test_what_the_client_has_seen_is_not_shown_again() -> None:
    """L3: line, prefill and echo are repeated by the engine, not to the client."""
    replay = replay_of("a")
    echo = PromptEcho(request_id="a", text="x")
    progress = PrefillProgress(request_id="a", total=9, cached=0, processed=4, time_ms=1.0)
    assert replay.record(progress)
    assert replay.record(echo)
    assert replay.record(token("a", 1))
    replay.bury(KILL)
    replay.release(0.0)
    assert not any(replay.record(event) for event in (Queued("a", 0), Admitted("a"), progress, echo))
    assert replay.record(token("a", 2))


def test_nothing_of_a_former_life_is_taken_for_the_new_one() -> None:
    """L3: between two lives nothing is recorded."""
    replay = replay_of("a")
    replay.bury(KILL)
    assert not replay.record(token("a", 1))
    assert replay.release(0.0)[0].generated == [[]]


def test_a_choice_that_has_ended_stays_ended() -> None:
    """L6: a delta after the last one is not shown."""
    replay = replay_of("a")
    assert replay.record(Delta(request_id="a", index=0, finish_reason=FinishReason.STOP))
    assert not replay.record(token("a", 1))


def test_one_terminal_event_ends_a_request() -> None:
    """L6: a second one, or one for an unknown id, goes nowhere."""
    replay = replay_of("a")
    finished = Finished(request_id="a", usage=Usage(), timings=Timings())
    assert replay.record(finished)
    assert not replay.record(finished)
    assert len(replay) == 0


def test_kills_from_outside_are_charged_to_nobody() -> None:
    """L3: ten of them change nothing."""
    replay = replay_of("a")
    for _ in range(10):
        assert replay.bury(KILL) == []
        assert given(replay) == ["a"]
        admit(replay, "a")


def test_the_third_crash_convicts_a_request_that_was_alone() -> None:
    """L3: with the number of crashes and what it had delivered."""
    replay = replay_of("a")
    for _ in range(MAX_CHARGES - 1):
        assert replay.bury(CRASH) == []
        assert given(replay) == ["a"]
        admit(replay, "a")
    (failed,) = replay.bury(CRASH)
    assert isinstance(failed, Failed)
    assert failed.error.code == EngineCrashedError.code
    assert failed.error.details == {"crashes": 3, "num_tokens": 0}
    assert len(replay) == 0


def test_a_token_of_progress_clears_a_request() -> None:
    """L3: crashes count only without progress in between."""
    replay = replay_of("a")
    for number in range(10):
        assert replay.bury(CRASH) == []
        assert given(replay) == ["a"]
        admit(replay, "a")
        replay.record(token("a", number))


def test_suspects_are_tried_one_at_a_time_before_anybody_else() -> None:
    """L3: two crashes in company make suspects, the newest first; the rest waits for their first tokens."""
    replay = replay_of("a", "b")
    replay.bury(CRASH)
    assert given(replay) == ["a", "b"]
    admit(replay, "a", "b")
    replay.bury(CRASH)
    replay.add("new", request(), 0.0)
    assert given(replay) == ["b"]
    admit(replay, "b")
    assert given(replay) == []
    replay.record(token("b", 1))
    assert given(replay) == ["a"]
    admit(replay, "a")
    replay.record(token("a", 1))
    assert given(replay) == ["new"]


@pytest.mark.parametrize("order", [("culprit", "innocent"), ("innocent", "culprit")])
def test_nobody_is_convicted_for_a_neighbours_crash(order: tuple[str, str]) -> None:
    """L3: the culprit fails alone, whoever came first."""
    replay = replay_of(*order)
    failed: list[str] = []
    for _ in range(10):
        if "culprit" in failed:
            break
        failed += [event.request_id for event in replay.bury(CRASH) if isinstance(event, Failed)]
        while (now := given(replay)) and "culprit" not in now:
            admit(replay, *now)
            for request_id in now:
                replay.record(token(request_id, 1))
        admit(replay, *now)
    assert failed == ["culprit"]
    assert [live.request_id for live in replay] == ["innocent"]


def test_a_request_in_the_line_is_not_charged_while_another_ran() -> None:
    """L3: only work in a step or in preparation can crash the engine."""
    replay = Replay()
    for request_id in ("running", "waiting"):
        replay.add(request_id, request(), 0.0)
    replay.release(0.0)
    admit(replay, "running")
    replay.record(Queued("waiting", 0))
    replay.bury(CRASH)
    assert {live.request_id: live.charges for live in replay} == {"running": 1, "waiting": 0}


def test_a_cancelled_request_is_not_replayed() -> None:
    """L6: the engine died before it could confirm; it ends as cancelled all the same."""
    replay = replay_of("a")
    replay.record(token("a", 1, 2))
    live = replay.get("a")
    assert live is not None
    live.is_cancelling = True
    cancelled, finished = replay.bury(KILL)
    assert isinstance(cancelled, Delta)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == 2
    assert given(replay) == []


def test_a_replay_refused_for_a_full_line_asks_again_when_a_place_is_free() -> None:
    """Q11, L3: not at once, which would be refused again, but at the next end."""
    replay = replay_of("a", "b")
    replay.bury(KILL)
    given(replay)
    admit(replay, "a")
    assert not replay.record(Failed("b", QueueFullError("full").info()))
    assert given(replay) == []
    replay.record(Finished(request_id="a", usage=Usage(), timings=Timings()))
    assert given(replay) == ["b"]


def test_a_new_request_is_refused_for_a_full_line() -> None:
    """Q11: the engine's bound stands."""
    replay = Replay()
    replay.add("a", request(), 0.0)
    replay.release(0.0)
    assert replay.record(Failed("a", QueueFullError("full").info()))
    assert len(replay) == 0


def test_two_live_requests_never_share_an_id() -> None:
    """L6: events are told apart by it."""
    replay = replay_of("a")
    with pytest.raises(InvalidRequestError):
        replay.add("a", request(), 0.0)
