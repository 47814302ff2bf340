"""What the client knows of its models, and which of them the next engine loads: no engine."""

from __future__ import annotations

import pytest
from scripted_engine import model_info

from stoker.client.models.registry import ModelRegistry
from stoker.client.models.specs import FoundModel
from stoker.client.process.exit import EngineExit
from stoker.errors import (
    InsufficientMemoryError,
    LoadCrashedError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    StokerError,
)
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelInfo, ModelSpec

CRASH = EngineExit("SIGSEGV", is_blamable=True, said="ASSERT(n > 0) failed")


def spec(model: str, **fields: object) -> ModelSpec:
    """A model to serve."""
    return ModelSpec(id=model, path=f"{model}.gguf", **fields)  # type: ignore[arg-type]


def unread(model: str) -> FoundModel:
    """A model to serve whose header was not read."""
    return FoundModel(spec(model), ModelInfo.bare(spec(model)))


def registry_of(*models: str) -> ModelRegistry:
    """A registry before its first engine."""
    return ModelRegistry(map(unread, models))


def tell(
    registry: ModelRegistry, model: str, state: str, *, error: StokerError | None = None, stage: str = ""
) -> None:
    """The engine reports; with the end of a load or unload it answers what was asked for last."""
    info = model_info(model, f"{model}.gguf") if state == "ready" else None
    asks = registry._entries[model].asks if state in {"ready", "absent", "failed"} and not stage else ()
    event = ModelState(
        model=model,
        state=state,
        info=info,
        error=error.info() if error else None,
        stage=stage,
        answers=max(asks, default=0),
    )
    registry.record(event)


def due(registry: ModelRegistry) -> list[tuple[str, bool]]:
    """What a booting engine loads, with whether idle models may go for it; each load is refused room."""
    found = []
    while (next_due := registry.next_due()) is not None:
        found.append((next_due.spec.id, next_due.may_evict))
        tell(registry, next_due.spec.id, "absent")
    return found


def test_every_model_is_served_before_it_is_loaded() -> None:
    """SPEC R3, K7: with what was asked for, where its header was not read; never a refusal."""
    registry = registry_of("a", "b")
    assert registry.resolve(None).id == registry.resolve("default").id == "a"
    assert (registry.resolve("b").n_ctx, registry.num_slots("b")) == (16384, 8)
    described = FoundModel(spec("b"), model_info("b", "b.gguf"))
    assert ModelRegistry([described]).resolve("b").n_vocab == 1000
    with pytest.raises(ModelNotFoundError, match="served: a, b"):
        registry.resolve("c")


def test_a_model_that_is_served_later_is_loaded_by_no_engine_until_it_is_asked_for() -> None:
    """N8: and it stays one of the models where its first load fails."""
    registry = registry_of("a")
    assert due(registry) == [("a", True)]
    later = unread("later")
    registry.serve(later.spec, later.info)
    assert registry.stats()["later"] == "absent"
    assert due(registry) == []
    registry.ask(later.spec, later.info)
    tell(registry, "later", "failed", error=InsufficientMemoryError("no room"))
    assert "later" in {info.id for info in registry.infos()}


def test_the_first_engine_loads_all_and_only_the_first_may_evict() -> None:
    """SPEC R3: the others are loaded as far as they fit beside those before them."""
    registry = registry_of("a", "b", "c")
    assert due(registry) == [("a", True), ("b", False), ("c", False)]
    assert due(registry) == []


def test_the_next_engine_loads_what_the_last_one_had() -> None:
    """SPEC L3: what was ready or on its way; not what was unloaded."""
    registry = registry_of("a", "b", "c", "d")
    due(registry)
    for model, state in (("b", "ready"), ("c", "loading"), ("d", "ready"), ("d", "unloading")):
        tell(registry, model, state)
    registry.begin_instance()
    assert registry.stats() == dict.fromkeys("abcd", "absent")
    assert due(registry) == [("b", True), ("c", False)]


def test_an_engine_that_dies_while_it_boots_leaves_the_rest_due() -> None:
    """SPEC L3: those it had not come to are loaded by the next one too."""
    registry = registry_of("a", "b", "c")
    registry.next_due()
    tell(registry, "a", "ready")
    registry.next_due()
    registry.begin_instance()
    assert [model for model, _ in due(registry)] == ["a", "b", "c"]


def test_a_suspended_model_is_shown_as_such_until_it_is_loaded_again() -> None:
    """SPEC L1, L2: exactly what was loaded; telling it twice changes nothing."""
    registry = registry_of("a", "b")
    due(registry)
    tell(registry, "b", "ready")
    registry.suspend()
    registry.suspend()
    assert registry.stats() == {"a": "absent", "b": "suspended"}
    assert due(registry) == [("b", True)]


def test_an_unloaded_model_is_not_loaded_by_the_next_engine() -> None:
    """SPEC R3: also where the engine died before it had let it go, or is suspended."""
    registry = registry_of("a", "b")
    due(registry)
    for model in ("a", "b"):
        tell(registry, model, "ready")
    registry.release("a", lambda _: True)
    registry.suspend()
    registry.release("b", lambda _: True)
    assert due(registry) == []


@pytest.mark.parametrize("is_told", [True, False], ids=["engine ended", "no engine"])
def test_an_unload_that_no_engine_will_answer_is_not_waited_for(*, is_told: bool) -> None:
    """SPEC L3: what the next engine says of the model holds, though it answers nothing."""
    registry = registry_of("a")
    due(registry)
    if is_told:
        registry.release("a", lambda _: True)
    registry.begin_instance()
    if not is_told:
        registry.release("a", lambda _: False)
    crashed = LoadCrashedError("a trial died of SIGSEGV").info()
    assert registry.record(ModelState(model="a", state="failed", error=crashed))
    assert registry.failure("a") == crashed


def test_a_load_that_kills_the_engine_twice_is_barred_until_it_is_asked_for_again() -> None:
    """SPEC L3: the one that was loading is charged, and a load that went well is no crash to count."""
    registry = registry_of("a", "b")
    due(registry)
    tell(registry, "b", "ready")
    for _ in range(2):
        tell(registry, "a", "loading", stage="weights")
        registry.charge(CRASH)
        registry.begin_instance()
    failure = registry.failure("a")
    assert failure is not None
    assert failure.details == {"model": "a", "crashes": 2}
    with pytest.raises(ModelLoadError):
        registry.resolve("a")
    assert [info.id for info in registry.infos()] == ["b"]
    assert registry.failure("b") is None
    registry.ask(spec("a"), registry.get("a").info)
    assert registry.resolve("a").id == "a"
    tell(registry, "a", "ready")
    tell(registry, "a", "loading", stage="weights")
    registry.charge(CRASH)
    assert registry.failure("a") is None


def test_a_load_otherwise_that_kills_engines_leaves_the_model_as_it_was() -> None:
    """SPEC L3, L5: it had gone for that load; the next engine loads it as before, and who asked is told."""
    registry = registry_of("a")
    registry.next_due()
    tell(registry, "a", "ready")
    before = registry.get("a").spec
    registry.ask(spec("a", num_slots=7), registry.get("a").info)
    tell(registry, "a", "unloading")
    for _ in range(2):
        tell(registry, "a", "loading", stage="weights")
        assert registry.load_failure("a") is None
        registry.charge(CRASH)
        registry.begin_instance()
    failure = registry.load_failure("a")
    assert failure is not None
    assert failure.details == {"model": "a", "crashes": 2}
    assert registry.failure("a") is None
    next_due = registry.next_due()
    assert next_due is not None
    assert next_due.spec == before
    assert registry.resolve("a").id == "a"


def test_no_way_of_a_load_that_was_given_up_comes_back_with_the_next_engine() -> None:
    """SPEC L3, L5: after a suspension all ways of a model are tried again, and those were another's."""
    registry = registry_of("a")
    registry.next_due()
    tell(registry, "a", "ready")
    before = registry.get("a").spec
    second = spec("a", num_slots=7, backend="second")
    registry.ask(spec("a", num_slots=7, backend="first", fallbacks=(second,)), registry.get("a").info)
    tell(registry, "a", "unloading")
    for way in ("first", "first", "second", "second"):
        event = ModelState(model="a", state="loading", stage="weights", path="a.gguf", backend=way)
        registry.record(event)
        registry.charge(CRASH)
        registry.begin_instance()
    assert registry.load_failure("a") is not None
    registry.next_due()
    tell(registry, "a", "ready")
    registry.suspend()
    assert registry.get("a").spec == before


def test_a_crash_in_a_child_of_a_load_otherwise_bars_nothing() -> None:
    """SPEC L3, L5: what was served before is served, though the engine could not bring it back by itself."""
    registry = registry_of("a")
    registry.next_due()
    tell(registry, "a", "ready")
    registry.ask(spec("a", num_slots=7), registry.get("a").info)
    tell(registry, "a", "failed", error=LoadCrashedError("a trial died of SIGSEGV"))
    assert registry.failure("a") is None
    assert registry.resolve("a").id == "a"


def barred(registry: ModelRegistry, model: str) -> None:
    """Its loads end two engines."""
    for _ in range(2):
        tell(registry, model, "loading", stage="weights")
        registry.charge(CRASH)
        registry.begin_instance()


def test_a_load_is_charged_before_it_has_said_how_far_it_is() -> None:
    """SPEC L3: from the reading of its header on; the error quotes what native code said last."""
    for stage in ("header", "weights"):
        registry = registry_of("a")
        for _ in range(2):
            tell(registry, "a", "loading", stage=stage)
            assert registry.charge(CRASH) == ["a"]
            registry.begin_instance()
        with pytest.raises(LoadCrashedError, match=r"SIGSEGV: ASSERT\(n > 0\) failed"):
            registry.resolve("a")


def test_a_model_that_crashed_a_child_is_barred_like_one_that_crashed_engines() -> None:
    """SPEC L3, R9: it is refused at once from then on; a plain refusal is told request by request."""
    registry = registry_of("a", "b")
    tell(registry, "a", "failed", error=LoadCrashedError("a trial died of SIGSEGV"))
    tell(registry, "b", "failed", error=ModelLoadError("unknown architecture"))
    with pytest.raises(LoadCrashedError, match="a trial died"):
        registry.resolve("a")
    assert registry.resolve("b").id == "b"
    tell(registry, "b", "ready")
    tell(registry, "b", "ready", error=LoadCrashedError("a trial of it with another context died"))
    assert registry.resolve("b").id == "b", "what it was to be replaced with crashed, not what serves"


def test_a_replaced_file_begins_anew() -> None:
    """SPEC L3: what its predecessor did is not remembered against it."""
    mark = "first"
    registry = ModelRegistry([unread("a")], lambda _: mark)
    barred(registry, "a")
    assert registry.failure("a") is not None
    mark = "second"
    assert registry.resolve("a").id == "a"
    assert not registry.known()[0].is_suspect
    tell(registry, "a", "loading", stage="weights")
    registry.charge(CRASH)
    assert registry.failure("a") is None


def test_whoever_asks_for_a_barred_model_has_it_tried_once_more() -> None:
    """SPEC L3: as a suspect; one further crash bars it again."""
    registry = registry_of("a")
    barred(registry, "a")
    assert registry.ask(spec("a"), registry.get("a").info).is_suspect
    tell(registry, "a", "loading", stage="weights")
    registry.charge(CRASH)
    assert registry.failure("a") is not None


def test_what_has_ended_an_engine_is_loaded_when_the_next_one_serves() -> None:
    """SPEC L3: nothing waits for it; once in memory it is as any other."""
    registry = registry_of("a", "b")
    due(registry)
    tell(registry, "b", "ready")
    tell(registry, "a", "loading", stage="weights")
    registry.charge(CRASH)
    registry.begin_instance()
    first = registry.next_due(skips_suspects=True)
    assert first is not None
    assert first.spec.id == "b"
    tell(registry, "b", "ready")
    assert registry.next_due(skips_suspects=True) is None
    assert [(load.spec.id, load.is_suspect) for load in registry.suspects_due()] == [("a", True)]
    tell(registry, "a", "ready")
    assert [known.is_suspect for known in registry.known()] == [False, False]


def test_a_model_that_is_loaded_otherwise_and_ends_the_engine_stays_as_it_was() -> None:
    """SPEC L5: the former settings serve on, and whoever asked hears why."""
    registry = registry_of("a")
    tell(registry, "a", "ready")
    registry.ask(spec("a", n_ctx=64), registry.get("a").info)
    tell(registry, "a", "ready", stage="weights")
    assert registry.charge(CRASH) == ["a"]
    registry.begin_instance()
    failure = registry.load_failure("a")
    assert failure is not None
    assert "ASSERT(n > 0) failed" in failure.message
    assert registry.failure("a") is None
    load = registry.next_due(skips_suspects=True)
    assert load is not None
    assert load.spec == spec("a")


def test_a_load_that_only_waits_for_room_is_not_charged() -> None:
    """SPEC L3: nothing native ran for it."""
    registry = registry_of("a")
    for _ in range(3):
        tell(registry, "a", "loading", stage="waiting")
        registry.charge(CRASH)
    assert registry.failure("a") is None


def test_a_failed_load_is_told_and_tried_again() -> None:
    """SPEC R4: any failure but crashes is told request by request; the model stays served."""
    registry = registry_of("a")
    tell(registry, "a", "failed", error=ModelFileError("no such file"))
    assert registry.failure("a") is None
    assert registry.resolve("a").id == "a"
    assert registry.statuses({"a": 3})[0].leases == 3
    assert registry.statuses({})[0].reason == "no such file"


def test_a_start_fails_for_a_broken_file_and_for_want_of_room_only_if_nothing_is_ready() -> None:
    """SPEC R1, L6: a refusal that is the machine's doing leaves the others to serve."""
    registry = registry_of("a", "b")
    tell(registry, "a", "failed", error=InsufficientMemoryError("no room"))
    failure = registry.start_failure()
    assert failure is not None
    assert failure.code == "insufficient_memory"
    tell(registry, "b", "ready")
    assert registry.start_failure() is None
    tell(registry, "a", "failed", error=ModelFileError("no such file"))
    failure = registry.start_failure()
    assert failure is not None
    assert failure.code == "model_file_invalid"


def test_a_model_loaded_otherwise_keeps_its_former_settings_where_that_fails() -> None:
    """SPEC L5: the new spec is the model's once it is in, not before."""
    registry = registry_of("a")
    tell(registry, "a", "ready")
    larger = spec("a", n_ctx=32768)
    registry.ask(larger, registry.get("a").info)
    assert registry.get("a").to_load == larger
    tell(registry, "a", "ready", error=InsufficientMemoryError("no room"))
    assert registry.get("a").to_load == spec("a")
    registry.ask(larger, registry.get("a").info)
    tell(registry, "a", "ready")
    assert registry.get("a").to_load == larger
    assert registry.resolve("a").path == "a.gguf"


def test_settings_that_are_read_while_a_load_waits_for_memory_are_taken_over() -> None:
    """SPEC R9: they are what is loaded next, not lost with the load that waits."""
    registry = registry_of("a")
    assert due(registry) == [("a", True)]
    registry.ask(spec("a", n_ctx=4096), model_info("a", "a.gguf"))
    registry.record(ModelState(model="a", state="absent"))
    to_load, gone = registry.take([FoundModel(spec("a", n_ctx=2000), model_info("a", "a.gguf"))])
    assert ([each.spec.id for each in to_load], gone) == (["a"], [])


def test_the_end_of_an_earlier_load_undoes_nothing_that_changed_at_once() -> None:
    """SPEC R9: how long a model stays and what it is called too are as they were said last."""
    registry = registry_of("a")
    assert due(registry) == [("a", True)]
    info = model_info("a", "a.gguf")
    earlier = registry.ask(spec("a", n_ctx=1024), info)
    registry.take([FoundModel(spec("a", keep_alive_s=7.0, aliases=("x",)), info)])
    registry.ask(spec("a", n_ctx=4096, keep_alive_s=7.0, aliases=("x",)), info)
    registry.record(ModelState(model="a", state="ready", info=info, answers=earlier.ask_id))
    assert registry.resolve("x").id == "a"
    assert registry.get("a").spec.keep_alive_s == 7.0


def test_moves_that_the_table_does_not_have_are_bugs(caplog: pytest.LogCaptureFixture) -> None:
    """SPEC L1: of our own they raise, with the story; the engine's word is taken, and told."""
    registry = registry_of("a")
    due(registry)
    tell(registry, "a", "ready")
    assert "the engine has a ready, which was absent; story: loading; absent" in caplog.text
    assert registry.stats() == {"a": "ready"}
    with pytest.raises(AssertionError, match=r"a is ready and cannot become loading; story: .*ready"):
        registry._begin_load(registry._entries["a"])


def test_a_model_on_its_way_out_is_asked_for_again() -> None:
    """SPEC L1, R3: it is gone first, and loaded then; what the engine says of that are moves of the table."""
    registry = registry_of("a")
    due(registry)
    for state in ("loading", "ready", "unloading"):
        tell(registry, "a", state)
    registry.ask(spec("a"), registry.get("a").info)
    assert registry.stats() == {"a": "unloading"}
    for state in ("absent", "loading", "ready"):
        tell(registry, "a", state)
    assert registry.stats() == {"a": "ready"}
