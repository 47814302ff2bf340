"""What a front knows of its models, and which of them the next engine loads: no engine."""

from __future__ import annotations

import pytest
from scripted_engine import model_info

from stoker.client.models.registry import Roster
from stoker.client.process.exit import Death
from stoker.errors import (
    InsufficientMemoryError,
    LoadCrashedError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    StokerError,
)
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelSpec

CRASH = Death("SIGSEGV", is_blamable=True, said="ASSERT(n > 0) failed")


def spec(model: str, **fields: object) -> ModelSpec:
    """A model to serve."""
    return ModelSpec(id=model, path=f"{model}.gguf", **fields)  # type: ignore[arg-type]


def roster_of(*models: str) -> Roster:
    """A roster before its first engine."""
    return Roster([spec(model) for model in models])


def tell(
    roster: Roster, model: str, state: str, *, error: StokerError | None = None, stage: str = ""
) -> None:
    """The engine reports."""
    info = model_info(model, f"{model}.gguf") if state == "ready" else None
    event = ModelState(
        model=model, state=state, info=info, error=error.info() if error else None, stage=stage
    )
    roster.record(event)


def due(roster: Roster) -> list[tuple[str, bool]]:
    """What a booting engine loads, with whether idle models may go for it; each load is refused room."""
    found = []
    while (next_due := roster.next_due()) is not None:
        found.append((next_due.spec.id, next_due.may_evict))
        tell(roster, next_due.spec.id, "absent")
    return found


def test_every_model_is_served_before_it_is_loaded() -> None:
    """SPEC R3, K7: with what was asked for, where nobody has read its header; never a refusal."""
    roster = roster_of("a", "b")
    assert roster.resolve(None).id == roster.resolve("default").id == "a"
    assert (roster.resolve("b").n_ctx, roster.num_slots("b")) == (16384, 8)
    roster.describe(model_info("b", "b.gguf"))
    assert roster.resolve("b").n_vocab == 1000
    with pytest.raises(ModelNotFoundError, match="served: a, b"):
        roster.resolve("c")


def test_the_first_engine_loads_all_and_only_the_first_may_evict() -> None:
    """SPEC R3: the others are loaded as far as they fit beside those before them."""
    roster = roster_of("a", "b", "c")
    assert due(roster) == [("a", True), ("b", False), ("c", False)]
    assert due(roster) == []


def test_the_next_engine_loads_what_the_last_one_had() -> None:
    """SPEC L3: what was ready or on its way; not what was unloaded."""
    roster = roster_of("a", "b", "c", "d")
    due(roster)
    for model, state in (("b", "ready"), ("c", "loading"), ("d", "ready"), ("d", "unloading")):
        tell(roster, model, state)
    roster.begin_life()
    assert roster.stats() == dict.fromkeys("abcd", "absent")
    assert due(roster) == [("b", True), ("c", False)]


def test_an_engine_that_dies_while_it_boots_leaves_the_rest_due() -> None:
    """SPEC L3: those it had not come to are loaded by the next one too."""
    roster = roster_of("a", "b", "c")
    roster.next_due()
    tell(roster, "a", "ready")
    roster.next_due()
    roster.begin_life()
    assert [model for model, _ in due(roster)] == ["a", "b", "c"]


def test_a_suspended_model_is_shown_as_such_until_it_is_loaded_again() -> None:
    """SPEC L1, L2: exactly what was loaded; telling it twice changes nothing."""
    roster = roster_of("a", "b")
    due(roster)
    tell(roster, "b", "ready")
    roster.suspend()
    roster.suspend()
    assert roster.stats() == {"a": "absent", "b": "suspended"}
    assert due(roster) == [("b", True)]


def test_an_unloaded_model_is_not_loaded_by_the_next_engine() -> None:
    """SPEC R3: also where the engine died before it had let it go, or is suspended."""
    roster = roster_of("a", "b")
    due(roster)
    for model in ("a", "b"):
        tell(roster, model, "ready")
    roster.release("a")
    roster.suspend()
    roster.release("b")
    assert due(roster) == []


def test_a_load_that_kills_the_engine_twice_is_barred_until_somebody_asks_again() -> None:
    """SPEC L3: the one that was loading is charged, and a load that went well is no crash to count."""
    roster = roster_of("a", "b")
    due(roster)
    tell(roster, "b", "ready")
    for _ in range(2):
        tell(roster, "a", "loading", stage="weights")
        roster.charge(CRASH)
        roster.begin_life()
    failure = roster.failure("a")
    assert failure is not None
    assert failure.details == {"model": "a", "crashes": 2}
    with pytest.raises(ModelLoadError):
        roster.resolve("a")
    assert [info.id for info in roster.infos()] == ["b"]
    assert roster.failure("b") is None
    roster.ask(spec("a"), roster.info("a"))
    assert roster.resolve("a").id == "a"
    tell(roster, "a", "ready")
    tell(roster, "a", "loading", stage="weights")
    roster.charge(CRASH)
    assert roster.failure("a") is None


def barred(roster: Roster, model: str) -> None:
    """Its loads end two engines."""
    for _ in range(2):
        tell(roster, model, "loading", stage="weights")
        roster.charge(CRASH)
        roster.begin_life()


def test_a_load_is_charged_before_it_has_said_how_far_it_is() -> None:
    """SPEC L3, A2: from the reading of its header on; the error quotes what native code said last."""
    for stage in ("header", "weights"):
        roster = roster_of("a")
        for _ in range(2):
            tell(roster, "a", "loading", stage=stage)
            assert roster.charge(CRASH) == ["a"]
            roster.begin_life()
        with pytest.raises(LoadCrashedError, match=r"SIGSEGV: ASSERT\(n > 0\) failed"):
            roster.resolve("a")


def test_a_model_that_crashed_a_child_is_barred_like_one_that_crashed_engines() -> None:
    """SPEC L3, R9: it is refused at once from then on; a plain refusal is told request by request."""
    roster = roster_of("a", "b")
    tell(roster, "a", "failed", error=LoadCrashedError("a trial died of SIGSEGV"))
    tell(roster, "b", "failed", error=ModelLoadError("unknown architecture"))
    with pytest.raises(LoadCrashedError, match="a trial died"):
        roster.resolve("a")
    assert roster.resolve("b").id == "b"
    tell(roster, "b", "ready")
    tell(roster, "b", "ready", error=LoadCrashedError("a trial of it with another context died"))
    assert roster.resolve("b").id == "b", "what it was to be replaced with crashed, not what serves"


def test_a_replaced_file_begins_anew() -> None:
    """SPEC L3: what its predecessor did is not remembered against it."""
    mark = "first"
    roster = Roster([spec("a")], lambda _: mark)
    barred(roster, "a")
    assert roster.failure("a") is not None
    mark = "second"
    assert roster.resolve("a").id == "a"
    assert not roster.known()[0].is_suspect
    tell(roster, "a", "loading", stage="weights")
    roster.charge(CRASH)
    assert roster.failure("a") is None


def test_whoever_asks_for_a_barred_model_has_it_tried_once_more() -> None:
    """SPEC L3: as a suspect; one further crash bars it again."""
    roster = roster_of("a")
    barred(roster, "a")
    assert roster.ask(spec("a"), roster.info("a")).is_suspect
    tell(roster, "a", "loading", stage="weights")
    roster.charge(CRASH)
    assert roster.failure("a") is not None


def test_what_has_ended_an_engine_is_loaded_when_the_next_one_serves() -> None:
    """SPEC L3, A2: nobody waits for it; once in memory it is as any other."""
    roster = roster_of("a", "b")
    due(roster)
    tell(roster, "b", "ready")
    tell(roster, "a", "loading", stage="weights")
    roster.charge(CRASH)
    roster.begin_life()
    first = roster.next_due(skips_suspects=True)
    assert first is not None
    assert first.spec.id == "b"
    tell(roster, "b", "ready")
    assert roster.next_due(skips_suspects=True) is None
    assert [(load.spec.id, load.is_suspect) for load in roster.suspects_due()] == [("a", True)]
    tell(roster, "a", "ready")
    assert [known.is_suspect for known in roster.known()] == [False, False]


def test_a_model_that_is_loaded_otherwise_and_ends_the_engine_stays_as_it_was() -> None:
    """SPEC L5: the former settings serve on, and whoever asked hears why."""
    roster = roster_of("a")
    tell(roster, "a", "ready")
    roster.ask(spec("a", n_ctx=64), roster.info("a"))
    tell(roster, "a", "ready", stage="weights")
    assert roster.charge(CRASH) == ["a"]
    roster.begin_life()
    failure = roster.load_failure("a")
    assert failure is not None
    assert "ASSERT(n > 0) failed" in failure.message
    assert roster.failure("a") is None
    load = roster.next_due(skips_suspects=True)
    assert load is not None
    assert load.spec == spec("a")


def test_a_load_that_only_waits_for_room_is_not_charged() -> None:
    """SPEC L3: nothing native ran for it."""
    roster = roster_of("a")
    for _ in range(3):
        tell(roster, "a", "loading", stage="waiting")
        roster.charge(CRASH)
    assert roster.failure("a") is None


def test_a_failed_load_is_told_and_tried_again() -> None:
    """SPEC R4: any failure but crashes is told request by request; the model stays served."""
    roster = roster_of("a")
    tell(roster, "a", "failed", error=ModelFileError("no such file"))
    assert roster.failure("a") is None
    assert roster.resolve("a").id == "a"
    assert roster.statuses({"a": 3})[0].leases == 3
    assert roster.statuses({})[0].reason == "no such file"


def test_a_start_fails_for_a_broken_file_and_for_want_of_room_only_if_nothing_is_ready() -> None:
    """SPEC R1, L6: a refusal that is the machine's doing leaves the others to serve."""
    roster = roster_of("a", "b")
    tell(roster, "a", "failed", error=InsufficientMemoryError("no room"))
    failure = roster.start_failure()
    assert failure is not None
    assert failure.code == "insufficient_memory"
    tell(roster, "b", "ready")
    assert roster.start_failure() is None
    tell(roster, "a", "failed", error=ModelFileError("no such file"))
    failure = roster.start_failure()
    assert failure is not None
    assert failure.code == "model_file_invalid"


def test_a_model_loaded_otherwise_keeps_its_former_settings_where_that_fails() -> None:
    """SPEC L5: the new spec is the model's once it is in, not before."""
    roster = roster_of("a")
    tell(roster, "a", "ready")
    larger = spec("a", n_ctx=32768)
    roster.ask(larger, roster.info("a"))
    assert roster.spec("a") == larger
    tell(roster, "a", "ready", error=InsufficientMemoryError("no room"))
    assert roster.spec("a") == spec("a")
    roster.ask(larger, roster.info("a"))
    tell(roster, "a", "ready")
    assert roster.spec("a") == larger
    assert roster.ready_paths() == ["a.gguf"]


def test_moves_that_the_table_does_not_have_are_bugs(caplog: pytest.LogCaptureFixture) -> None:
    """SPEC L1: of our own they raise, with the story; the engine's word is taken, and told."""
    roster = roster_of("a")
    due(roster)
    tell(roster, "a", "unloading")
    assert "the engine has a unloading, which was absent; story: loading; absent" in caplog.text
    assert roster.stats() == {"a": "unloading"}
    with pytest.raises(AssertionError, match=r"a is unloading and cannot become loading; story: .*unloading"):
        roster._begin_load(roster._entries["a"])


def test_a_model_on_its_way_out_is_asked_for_again() -> None:
    """SPEC L1, R3: it is gone first, and loaded then; what the engine says of that are moves of the table."""
    roster = roster_of("a")
    due(roster)
    for state in ("loading", "ready", "unloading"):
        tell(roster, "a", state)
    roster.ask(spec("a"), roster.info("a"))
    assert roster.stats() == {"a": "unloading"}
    for state in ("absent", "loading", "ready"):
        tell(roster, "a", state)
    assert roster.stats() == {"a": "ready"}
