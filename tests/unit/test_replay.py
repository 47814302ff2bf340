"""What a restart replays, and whom a crash is charged to: no engine, no clock."""

from __future__ import annotations

import msgspec
import pytest
from scripted_engine import request

from stoker.client.process.exit import EngineExit
from stoker.client.requests.record import MAX_CHARGES, RequestRecord
from stoker.client.requests.replay import Replay
from stoker.client.requests.table import RequestTable
from stoker.errors import EngineCrashedError, InvalidRequestError, QueueFullError
from stoker.ipc.commands import Submit
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    Preparing,
    PromptEcho,
    Queued,
    RequestEvent,
    Resumed,
)
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, Usage

CRASH = EngineExit("crashed", is_blamable=True)
KILL = EngineExit("killed", is_blamable=False)


def replay_of(*request_ids: str, n: int = 1) -> Replay:
    """A replay with requests that an engine has admitted."""
    replay = Replay(RequestTable())
    for request_id in request_ids:
        replay.add(RequestRecord(request_id, request(n=n), 0.0))
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


def parked(request_id: str, index: int = 0) -> Parked:
    """The engine takes a choice's slot."""
    return Parked(request_id=request_id, index=index, form="cells", reason="interactive")


def find(replay: Replay, request_id: str) -> RequestRecord:
    """The live request of that id."""
    live = replay._table.find(request_id)
    assert live is not None
    return live


def pause(replay: Replay, request_id: str) -> None:
    """Its caller pauses it, and an engine that has it says so."""
    replay.pause(find(replay, request_id))
    replay.record(Paused(request_id))


def charges(replay: Replay) -> dict[str, int]:
    """What is charged to whom."""
    return {live.request_id: live.charges for live in replay}


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
    assert replay.engine_exited(KILL) == []
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
    replay = Replay(RequestTable())
    replay.add(RequestRecord("a", request(), 0.0))
    replay.release(0.0)
    replay.engine_exited(KILL)
    assert replay.release(1.0) == [Submit(request_id="a", request=request(), age_s=1.0)]


def test_what_the_client_has_seen_is_not_shown_again() -> None:
    """L3: line, prefill and echo are repeated by the engine, not to the client."""
    replay = Replay(RequestTable())
    asked = msgspec.structs.replace(request(), return_progress=True)
    replay.add(RequestRecord("a", asked, 0.0))
    replay.release(0.0)
    admit(replay, "a")
    echo = PromptEcho(request_id="a", text="x")
    progress = PrefillProgress(request_id="a", total=9, cached=0, processed=4, time_ms=1.0)
    assert replay.record(progress)
    assert replay.record(echo)
    assert replay.record(token("a", 1))
    replay.engine_exited(KILL)
    replay.release(0.0)
    assert not any(replay.record(event) for event in (Queued("a", 0), Admitted("a"), progress, echo))
    assert replay.record(token("a", 2))


def test_nothing_of_a_former_life_is_taken_for_the_new_one() -> None:
    """L3: between two lives nothing is recorded."""
    replay = replay_of("a")
    replay.engine_exited(KILL)
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
        assert replay.engine_exited(KILL) == []
        assert given(replay) == ["a"]
        admit(replay, "a")


def test_the_third_crash_convicts_a_request_that_was_alone() -> None:
    """L3: with the number of crashes and what it had delivered."""
    replay = replay_of("a")
    for _ in range(MAX_CHARGES - 1):
        assert replay.engine_exited(CRASH) == []
        assert given(replay) == ["a"]
        admit(replay, "a")
    (failed,) = replay.engine_exited(CRASH)
    assert isinstance(failed, Failed)
    assert failed.error.code == EngineCrashedError.code
    assert failed.error.details == {"crashes": 3, "num_tokens": 0}
    assert len(replay) == 0


def test_a_token_of_progress_clears_a_request() -> None:
    """L3: crashes count only without progress in between."""
    replay = replay_of("a")
    for number in range(10):
        assert replay.engine_exited(CRASH) == []
        assert given(replay) == ["a"]
        admit(replay, "a")
        replay.record(token("a", number))


def test_suspects_are_tried_one_at_a_time_before_anybody_else() -> None:
    """L3: two crashes in company make suspects, the newest first; the rest waits for their first tokens."""
    replay = replay_of("a", "b")
    replay.engine_exited(CRASH)
    assert given(replay) == ["a", "b"]
    admit(replay, "a", "b")
    replay.engine_exited(CRASH)
    replay.add(RequestRecord("new", request(), 0.0))
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
        failed += [event.request_id for event in replay.engine_exited(CRASH) if isinstance(event, Failed)]
        while (now := given(replay)) and "culprit" not in now:
            admit(replay, *now)
            for request_id in now:
                replay.record(token(request_id, 1))
        admit(replay, *now)
    assert failed == ["culprit"]
    assert [live.request_id for live in replay] == ["innocent"]


def test_a_request_in_the_line_is_not_charged_while_another_ran() -> None:
    """L3: only work in a step or in preparation can crash the engine."""
    replay = Replay(RequestTable())
    for request_id in ("running", "waiting"):
        replay.add(RequestRecord(request_id, request(), 0.0))
    replay.release(0.0)
    admit(replay, "running")
    replay.record(Queued("waiting", 0))
    replay.engine_exited(CRASH)
    assert charges(replay) == {"running": 1, "waiting": 0}


def test_a_parked_request_is_not_charged_while_another_ran() -> None:
    """L3, Q4: without a slot it was in no step; with one again, it was."""
    replay = replay_of("running", "parked", "back")
    for request_id in ("parked", "back"):
        replay.record(parked(request_id))
    admit(replay, "back")
    replay.engine_exited(CRASH)
    assert charges(replay) == {"running": 1, "parked": 0, "back": 1}


def test_one_choice_in_a_slot_is_enough_to_be_charged() -> None:
    """L3, Q16: of three choices one has ended and one is parked; the third may have crashed the engine."""
    replay = replay_of("a", "b", n=3)
    replay.record(Delta(request_id="a", index=0, finish_reason=FinishReason.STOP))
    replay.record(parked("a", 2))
    replay.engine_exited(CRASH)
    assert charges(replay) == {"a": 1, "b": 1}


def test_a_request_whose_last_running_choice_ended_is_not_charged() -> None:
    """L3, Q16: the other one is parked."""
    replay = replay_of("a", "b", n=2)
    replay.record(parked("a", 1))
    replay.record(Delta(request_id="a", index=0, finish_reason=FinishReason.STOP))
    replay.engine_exited(CRASH)
    assert charges(replay) == {"a": 0, "b": 1}


def test_a_token_tells_that_a_parked_choice_runs_again() -> None:
    """L3: though the engine's word of it were lost."""
    replay = replay_of("a", "b")
    replay.record(parked("a"))
    replay.record(token("a", 1))
    replay.engine_exited(CRASH)
    assert charges(replay) == {"a": 1, "b": 1}


def test_a_paused_request_is_charged_for_nothing() -> None:
    """L3, Q17: not even if it was the only one."""
    replay = replay_of("a")
    pause(replay, "a")
    for _ in range(MAX_CHARGES):
        assert replay.engine_exited(CRASH) == []
        assert given(replay) == ["a"]
    assert charges(replay) == {"a": 0}


def test_a_pause_that_no_engine_confirmed_does_not_clear_a_request() -> None:
    """L3, Q17: the step that crashed may have been its own."""
    replay = replay_of("a")
    replay.pause(find(replay, "a"))
    assert replay.engine_exited(CRASH) == [Paused("a")]
    assert charges(replay) == {"a": 1}


def test_a_resumed_request_is_charged_again_once_it_runs() -> None:
    """L3, Q17: in the line it is not."""
    replay = replay_of("a", "b")
    pause(replay, "a")
    assert replay.resume(find(replay, "a")) == [Resumed("a")]
    replay.record(Resumed("a"))
    replay.engine_exited(CRASH)
    assert charges(replay) == {"a": 0, "b": 1}
    given(replay)
    admit(replay, "a", "b")
    replay.engine_exited(CRASH)
    assert charges(replay) == {"a": 1, "b": 2}


def test_a_paused_request_is_submitted_paused_with_what_it_had() -> None:
    """Q17, L3: and is told of it no second time."""
    replay = replay_of("a")
    replay.record(token("a", 1, 2))
    pause(replay, "a")
    assert replay.engine_exited(KILL) == []
    (submit,) = replay.release(0.0)
    assert (submit.generated, submit.is_paused) == ([[1, 2]], True)
    assert not any(replay.record(event) for event in (Queued("a", 0), Paused("a")))
    assert replay.resume(find(replay, "a")) == [Resumed("a")]
    assert not replay.record(Resumed("a"))
    assert replay.record(Queued("a", 2))


def test_a_pause_is_shown_when_no_token_can_come_and_a_resumption_at_once() -> None:
    """Q17: one that was taken back before the engine heard of it is not shown at all."""
    replay = replay_of("a")
    live = find(replay, "a")
    assert replay.pause(live) == []
    assert replay.record(Paused("a"))
    assert replay.resume(live) == [Resumed("a")]
    assert not replay.record(Resumed("a"))
    assert replay.pause(live) == []
    assert replay.resume(live) == []
    assert not replay.record(Paused("a"))
    assert not replay.record(Resumed("a"))


def test_a_paused_request_that_no_engine_accepted_is_kept_until_it_is_resumed() -> None:
    """Q17, L3: its preparation may be what crashes; nobody could be blamed for that."""
    replay = Replay(RequestTable())
    replay.add(RequestRecord("a", request(), 0.0))
    live = find(replay, "a")
    assert replay.pause(live) == [Paused("a")]
    assert given(replay) == []
    assert replay.resume(live) == [Resumed("a")]
    assert replay.release(1.0) == [Submit(request_id="a", request=request(), age_s=1.0)]


def test_nobody_waits_for_a_paused_suspect() -> None:
    """L3, Q17: it is no trial while it stands still; the others go on without it."""
    replay = replay_of("a", "b")
    for _ in range(MAX_CHARGES - 1):
        replay.engine_exited(CRASH)
        trial = given(replay)
        admit(replay, *trial)
    assert trial == ["b"]
    assert replay.is_on_trial
    pause(replay, "b")
    assert given(replay) == ["a"]  # a suspect as well
    admit(replay, "a")
    replay.record(token("a", 1))
    assert not replay.is_on_trial
    replay.engine_exited(KILL)
    assert given(replay) == ["a"]
    replay.resume(find(replay, "b"))
    assert given(replay) == ["b"]
    assert not replay.is_on_trial


def test_pausing_saves_nobody_from_conviction() -> None:
    """L3, Q17: a request that was paused and resumed in company is tried alone again."""
    replay = replay_of("culprit", "other")
    failed: list[str] = []
    for _ in range(10):
        if failed:
            break
        failed += [event.request_id for event in replay.engine_exited(CRASH) if isinstance(event, Failed)]
        now = given(replay)
        if len(failed) == 0 and find(replay, "culprit").charges == 1:
            pause(replay, "culprit")
            replay.resume(find(replay, "culprit"))
        while now and "culprit" not in now:
            admit(replay, *now)
            replay.record(token("other", 1))
            now = given(replay)
        admit(replay, *now)
    assert failed == ["culprit"]


def test_places_in_the_line_are_shown_again_after_an_interruption() -> None:
    """Q14, Q4: a restart's own line is not; but whoever is parked, or goes on after a pause, waits again."""
    replay = replay_of("a")
    replay.record(token("a", 1))
    replay.engine_exited(KILL)
    given(replay)
    assert not replay.record(Queued("a", 3))
    admit(replay, "a")
    assert replay.record(parked("a"))
    assert replay.record(Queued("a", 1))


def test_a_cancelled_request_is_not_replayed() -> None:
    """L6: the engine died before it could confirm; it ends as cancelled all the same."""
    replay = replay_of("a")
    replay.record(token("a", 1, 2))
    live = replay._table.find("a")
    assert live is not None
    live.is_cancelling = True
    cancelled, finished = replay.engine_exited(KILL)
    assert isinstance(cancelled, Delta)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == 2
    assert given(replay) == []


def test_a_replay_refused_for_a_full_line_asks_again_when_a_place_is_free() -> None:
    """Q11, L3: not at once, which would be refused again, but at the next end."""
    replay = replay_of("a", "b")
    replay.engine_exited(KILL)
    given(replay)
    admit(replay, "a")
    assert not replay.record(Failed("b", QueueFullError("full").info()))
    assert given(replay) == []
    replay.record(Finished(request_id="a", usage=Usage(), timings=Timings()))
    assert given(replay) == ["b"]


def test_a_new_request_is_refused_for_a_full_line() -> None:
    """Q11: the engine's bound stands."""
    replay = Replay(RequestTable())
    replay.add(RequestRecord("a", request(), 0.0))
    replay.release(0.0)
    assert replay.record(Failed("a", QueueFullError("full").info()))
    assert len(replay) == 0


def test_two_live_requests_never_share_an_id() -> None:
    """L6: events are told apart by it."""
    replay = replay_of("a")
    with pytest.raises(InvalidRequestError):
        replay.add(RequestRecord("a", request(), 0.0))


# ------------------------------------------------------------ preparation


def prepared(replay: Replay, *request_ids: str) -> None:
    """The engine says that these are past their preparation."""
    for request_id in request_ids:
        replay.record(Preparing(request_id))
        replay.record(Queued(request_id, 0))


def added(replay: Replay, *request_ids: str) -> Replay:
    """Further requests, given to the engine at once."""
    for request_id in request_ids:
        replay.add(RequestRecord(request_id, request(), 0.0))
    replay.release(0.0)
    return replay


def failed(events: list[RequestEvent]) -> list[str]:
    """Whom a death has ended."""
    return [event.request_id for event in events if isinstance(event, Failed)]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_crash_that_only_one_preparation_can_have_caused_convicts_it_at_once(is_told) -> None:
    """L3: whether or not the engine could still say so; the requests in the line are not concerned."""
    replay = added(Replay(RequestTable()), "waiting")
    prepared(replay, "waiting")
    added(replay, "bad")
    if is_told:
        assert not replay.record(Preparing("bad"))  # no client sees it
    (event,) = replay.engine_exited(CRASH)
    assert isinstance(event, Failed)
    assert event.request_id == "bad"
    assert event.error.code == EngineCrashedError.code
    assert event.error.details["crashes"] == 1
    assert "died 1 time preparing request bad" in event.error.message
    assert given(replay) == ["waiting"]


def test_a_preparation_beside_running_requests_is_tried_alone_before_it_is_convicted() -> None:
    """L3: the crash may have been a step's; alone it can only be its own."""
    replay = added(replay_of("running"), "bad")
    assert failed(replay.engine_exited(CRASH)) == []
    assert given(replay) == ["bad"]
    assert given(replay) == []
    assert failed(replay.engine_exited(CRASH)) == ["bad"]
    assert given(replay) == ["running"]
    assert charges(replay) == {"running": 1}


def test_a_kill_for_a_hang_or_for_memory_convicts_no_preparation_at_once() -> None:
    """L3: what else the machine was short of is not its doing; alone again, it is."""
    replay = added(Replay(RequestTable()), "bad")
    killed = EngineExit("killed: no sign of life", is_blamable=True, was_killed=True)
    assert failed(replay.engine_exited(killed)) == []
    assert given(replay) == ["bad"]
    assert failed(replay.engine_exited(killed)) == ["bad"]


def test_of_several_in_preparation_each_is_tried_until_it_is_prepared() -> None:
    """L3: the newest first; who has a place in the line is cleared, and the others may come."""
    replay = added(Replay(RequestTable()), "good", "bad", "better")
    assert failed(replay.engine_exited(CRASH)) == []
    assert given(replay) == ["better"]
    prepared(replay, "better")
    assert given(replay) == ["bad"]
    replay.record(Preparing("bad"))
    assert failed(replay.engine_exited(CRASH)) == ["bad"]
    assert given(replay) == ["good"]
    prepared(replay, "good")
    assert given(replay) == ["better"]


def test_waiting_for_a_model_clears_nobody() -> None:
    """L3: it has not been prepared yet; once it is, a crash is its own."""
    replay = added(replay_of("running"), "bad")
    replay.engine_exited(CRASH)
    assert given(replay) == ["bad"]
    replay.record(Queued("bad", 0, awaits_model=True))
    assert given(replay) == []
    replay.record(Preparing("bad"))
    assert failed(replay.engine_exited(CRASH)) == ["bad"]


def test_a_load_or_a_question_beside_a_preparation_may_have_been_the_cause() -> None:
    """L3: it is tried alone; and no request in the line is charged with a load."""
    replay = added(Replay(RequestTable()), "waiting")
    prepared(replay, "waiting")
    added(replay, "new")
    loading = CRASH.beside("the load of m")
    assert failed(replay.engine_exited(loading)) == []
    assert given(replay) == ["new"]
    prepared(replay, "new")
    assert given(replay) == ["waiting"]
    prepared(replay, "waiting")
    assert replay.engine_exited(loading) == []
    assert charges(replay) == {"waiting": 0, "new": 0}
