"""What the engine does about a shortage of memory, rung by rung, and that it ends."""

import pytest

from memory_stand_in import MIB, Clock, Gate
from stoker.ipc.events import Delta, Failed, Finished, Parked, PressureMoved, RungTaken
from stoker.ipc.request import Priority
from stoker.machine import malloc
from stoker.machine.ladder import LADDER, Rung
from stoker.machine.pressure import EVENT_HOLD_S, Pressure

ORDER = "eog_period=0,weights_mib=100"
LONG = {"prompt": "a long story " * 10, "max_tokens": 500}


# ---------------------------------------------------------------- the ladder


def test_rungs_are_taken_in_order_and_undone_in_the_opposite_one(make, clock, caplog):
    """SPEC M4: one a sample, all of them told."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    assert machine.rungs() == list(LADDER)
    (moved,) = machine.of(PressureMoved)
    assert moved.level == "critical"
    assert f"memory ladder: trim_allocator, as {moved.source} is at" in caplog.text
    machine.calm(clock)
    assert "memory ladder: undone: trim_allocator\n" in caplog.text
    assert machine.rungs() == [*LADDER, *(f"-{rung}" for rung in reversed(LADDER))]
    assert [e.level for e in machine.of(PressureMoved)] == ["critical", "normal"]
    memory = machine.status().memory
    assert (memory.pressure, memory.rungs) == ("normal", [])


def test_a_warning_costs_nobody_a_place(make, clock):
    """SPEC M4: it climbs to idle cells at most."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("r", "a", max_tokens=600)
    machine.submit("b", "a", max_tokens=600, priority=Priority.BACKGROUND)
    machine.until_tokens("b", 5)
    for _ in range(20):
        clock.pass_(1)
        machine.feel(Pressure.WARNING)
    assert machine.rungs() == list(LADDER[:3])
    machine.run("r", "b")
    assert machine.of(Parked) == []
    assert machine.status().memory.rungs == list(LADDER[:3])


def test_an_event_of_the_system_counts_as_critical_and_alone_parks_nobody(make, clock):
    """SPEC M3, M4: at once, and held for seconds only."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("r", "a", **LONG)
    machine.until_tokens("r", 5)
    machine.feel(Pressure.NORMAL, is_os_event=True)
    assert machine.rungs() == [Rung.TRIM_ALLOCATOR]
    assert [(e.level, e.source) for e in machine.of(PressureMoved)] == [("critical", "event")]
    for _ in range(int(EVENT_HOLD_S) + 3):
        clock.pass_(1)
        machine.feel(Pressure.NORMAL)
    assert Rung.PARK_INTERACTIVE not in machine.rungs()
    machine.run("r")
    assert machine.output("r") == make.alone(**LONG)


def test_the_first_rung_trims_the_allocator(make, clock, monkeypatch):
    """SPEC M4."""
    trims = []
    monkeypatch.setattr(malloc, "trim", lambda: trims.append(1))
    machine = make()
    machine.have("a", order=ORDER)
    machine.climb(clock, Rung.TRIM_ALLOCATOR, Pressure.WARNING)
    assert trims == [1]


def stored(machine, name):
    """What the cache holds in memory after another request has ended."""
    machine.submit(name, "a", prompt=f"{name} {'x' * 1000}")
    machine.run(name)
    runner = machine.runner("a")
    while runner.has_unstored:
        runner.rest(machine.loop._clock.now())
    return machine.loop._store.cache.ram_bytes


def test_prefixes_that_were_in_use_go_as_soon_as_they_are_not(make, clock):
    """SPEC M4, C14: one that was just being saved when its rung was taken does not stay for that."""
    machine = make(cache_disk_bytes=0)
    machine.have("a", order=ORDER)
    held = stored(machine, "r")
    (entry,) = machine.loop._store.cache.index
    entry.leases.add("tested")
    machine.climb(clock, Rung.DROP_SNAPSHOTS, Pressure.WARNING)
    assert machine.loop._store.cache.ram_bytes == held
    entry.leases.discard("tested")
    machine.feel(Pressure.WARNING)
    assert machine.loop._store.cache.ram_bytes == 0


def test_stored_prefixes_go_and_none_is_stored_until_there_is_memory(make, clock):
    """SPEC M4, C14: what they freed is told."""
    machine = make(cache_disk_bytes=0)
    machine.have("a", order=ORDER)
    held = stored(machine, "r")
    assert held > 0
    machine.climb(clock, Rung.DROP_SNAPSHOTS, Pressure.WARNING)
    (told,) = [e for e in machine.of(RungTaken) if e.rung == Rung.DROP_SNAPSHOTS]
    assert told.freed_bytes == held
    assert machine.loop._store.cache.ram_bytes == 0
    assert stored(machine, "s") == 0
    machine.calm(clock)
    assert stored(machine, "t") > 0


def test_cells_that_nobody_needs_go_and_are_not_kept_until_there_is_memory(make, clock):
    """SPEC M4: those of running requests stay."""
    machine = make()
    machine.have("a", num_slots=4, order=ORDER)
    cells = machine.runner("a").scheduler.cells

    def kept(name):
        machine.submit(name, "a", prompt=f"{name} {'x' * 200}")
        machine.run(name)
        machine.turn()
        return cells.used

    assert kept("r") >= 200
    machine.climb(clock, Rung.DROP_IDLE_CELLS, Pressure.WARNING)
    assert cells.used == 0
    machine.submit("long", "a", **LONG)
    machine.until_tokens("long", 50)
    kept("s")
    machine.until_tokens("long", 100)
    assert cells.used <= len(LONG["prompt"]) + len(machine.tokens("long"))
    machine.runner("a").scheduler.check()
    machine.run("long")
    assert machine.output("long") == make.alone(**LONG)
    machine.calm(clock)
    assert kept("t") >= 200


def test_newcomers_find_half_the_slots_and_those_that_run_are_not_touched(make, clock):
    """SPEC M4: lower slots and context for new requests."""
    machine = make()
    machine.have("a", num_slots=4, order=ORDER)
    for name in ("r0", "r1", "r2", "r3"):
        machine.submit(name, "a", max_tokens=400)
    machine.until_tokens("r3", 5)
    machine.climb(clock, Rung.LOWER_LIMITS)
    slots = machine.runner("a").scheduler.slots
    machine.until_tokens("r3", 20)
    assert len(slots.running) == 4
    late = [f"s{number}" for number in range(4)]
    for name in late:
        machine.submit(name, "a", max_tokens=200)
    machine.run("r0", "r1", "r2", "r3")
    machine.until_tokens("s0", 10)
    assert len(slots.running) == 2
    machine.calm(clock)
    machine.until_tokens("s3", 1)
    machine.run(*late)
    assert machine.of(Parked) == []


def test_one_alone_may_have_more_than_half_of_the_cells(make, clock):
    """SPEC M4, Q15: it cannot be served otherwise."""
    machine = make()
    machine.have("a", n_ctx=512, order=ORDER)
    machine.climb(clock, Rung.LOWER_LIMITS)
    machine.submit("r", "a", prompt="x" * 400, max_tokens=100)
    machine.submit("s", "a", prompt="y" * 400, max_tokens=100)
    machine.run("r", "s")
    assert machine.output("r") == make.alone(prompt="x" * 400, max_tokens=100, n_ctx=512)
    assert machine.of(Failed) == []


def test_background_stands_still_and_goes_on_with_its_text(make, clock):
    """SPEC M4: paused, not lost; what somebody waits for goes on."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("b", "a", priority=Priority.BACKGROUND, **LONG)
    machine.submit("r", "a", prompt="another", max_tokens=400)
    machine.until_tokens("b", 20)
    machine.climb(clock, Rung.PAUSE_BACKGROUND)
    num_tokens = len(machine.tokens("b"))
    machine.submit("c", "a", priority=Priority.BACKGROUND)
    machine.run("r")
    assert len(machine.tokens("b")) <= num_tokens + 1
    assert not machine.tokens("c")
    assert [e.reason for e in machine.of(Parked, "b")] == ["memory pressure: background waits"]
    assert machine.loop._wait_s() != 0, "it does not spin over those that it holds"
    machine.calm(clock)
    machine.run("b", "c")
    assert machine.output("b") == make.alone(**LONG)


def test_idle_models_go_and_busy_and_pinned_ones_stay(make, monkeypatch):
    """SPEC M4: and one that becomes idle while memory is short goes then."""
    clock = Clock(monkeypatch, is_still=True)
    machine = make()
    machine.have("a", "c", order=ORDER)
    machine.have("p", is_pinned=True, order=ORDER)
    machine.submit("r", "a", **LONG)
    machine.until_tokens("r", 5)
    machine.climb(clock, Rung.UNLOAD_IDLE)
    assert [machine.state(model) for model in "acp"] == ["ready", "absent", "ready"]
    (told,) = [e for e in machine.of(RungTaken) if e.rung == Rung.UNLOAD_IDLE]
    assert told.freed_bytes >= 100 * MIB
    machine.run("r")
    machine.feel(Pressure.CRITICAL)  # too early for the next rung
    assert machine.state("a") == "absent"
    assert Rung.PARK_INTERACTIVE not in machine.rungs()


@pytest.mark.long
def test_the_last_rung_parks_everybody_and_all_go_on_after_the_calm(make, clock):
    """SPEC M4: models out, no request lost, newcomers wait."""
    machine = make()
    machine.have("a", "b", order=ORDER)
    machine.have("p", is_pinned=True, order=ORDER)
    for model in ("a", "b", "p"):
        machine.submit(f"r-{model}", model, **LONG)
        machine.submit(f"b-{model}", model, priority=Priority.BACKGROUND, prompt="job", max_tokens=200)
    machine.until(lambda: all(len(machine.tokens(f"r-{model}")) > 20 for model in "abp"))
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    machine.turn()
    assert [machine.state(model) for model in "abp"] == ["absent", "absent", "ready"]
    assert machine.ledger["weights"] == 100 * MIB
    machine.submit("late", "a")
    num_deltas = len(machine.of(Delta))
    for _ in range(30):
        clock.pass_(1)
        machine.feel(Pressure.CRITICAL)
    assert len(machine.of(Delta)) == num_deltas
    assert machine.of((Finished, Failed)) == []
    assert machine.loop._wait_s() != 0, "it does not spin"
    machine.calm(clock)
    machine.run("late", *(f"{kind}-{model}" for kind in "rb" for model in "abp"))
    for model in "abp":
        assert machine.output(f"r-{model}") == make.alone(**LONG)
        assert machine.output(f"b-{model}") == make.alone(prompt="job", max_tokens=200)
    assert machine.of(Failed) == []


def test_a_load_that_goes_on_is_stopped_by_the_last_rung_and_begun_again_after_it(make, clock, monkeypatch):
    """SPEC M4, M5: nothing comes into memory while everybody is out."""
    gate = Gate(monkeypatch)
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    gate.open()
    machine.loop._load_threads._loader.submit(int).result()
    machine.turn()
    assert machine.runner("a") is None
    assert "weights" not in machine.ledger
    assert machine.state("a") == "absent"
    machine.calm(clock)
    machine.run("r")
    assert machine.finished("r")


def test_time_passes_for_those_that_wait_for_memory(make, clock):
    """SPEC Q6."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("r", "a", timeout_s=300.0, **LONG)
    machine.until_tokens("r", 20)
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    clock.pass_(300)
    machine.run("r")
    assert machine.error("r").code == "request_timeout"


def test_what_was_refused_for_want_of_memory_before_is_no_spin_while_all_stand_still(make, clock):
    """SPEC Q15: a try that is overdue waits for the calm like everything else."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("r", "a", **LONG)
    machine.until_tokens("r", 20)
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    machine.others_mib = 900
    machine.calm(clock)
    machine.until(lambda: machine.state("a") == "failed")
    assert not machine.has_ended("r"), "what has begun waits on"
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    clock.pass_(60)
    machine.turn()
    assert machine.loop._wait_s() != 0
    machine.others_mib = 0
    machine.calm(clock)
    machine.run("r")
    assert machine.output("r") == make.alone(**LONG)


@pytest.mark.long
def test_two_squeezes_leave_no_trace(make, clock):
    """SPEC M3, M4: every stream has its whole text, and everything is as before."""
    machine = make()
    machine.have("a", "b", order=ORDER)
    names = {"r": "a", "s": "a", "t": "b", "u": "b"}
    for name, model in names.items():
        machine.submit(name, model, prompt=f"{name} {LONG['prompt']}", max_tokens=500)
    for _ in range(2):
        machine.until(lambda: machine.loop._runners.has_work)
        for _ in range(10):
            machine.turn()
        machine.climb(clock, Rung.PARK_INTERACTIVE)
        machine.calm(clock)
    machine.run(*names)
    for name in names:
        assert machine.output(name) == make.alone(prompt=f"{name} {LONG['prompt']}", max_tokens=500)
    order = [*LADDER, *(f"-{rung}" for rung in reversed(LADDER))]
    assert machine.rungs() == order * 2
    machine.submit("new", "a")
    machine.run("new")
