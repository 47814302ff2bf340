"""Models on devices of their own compute at the same time; on one device a step waits for the one before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import pytest
from test_overlapping_steps import Bench

from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.protocol.backend import BatchPlan, InFlight, Rows
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.turns import Runners
from stoker.engine.threads.timer import EVERYWHERE, StepTimer, Stopwatch
from stoker.ipc.model import ModelSpec

LEFT, RIGHT = frozenset({"left"}), frozenset({"right"})


def on_cards(*cards: str) -> list[Bench]:
    """A model on each of these cards, with one timer between them."""
    timer, found = StepTimer(Stopwatch(60.0)), []
    for card in cards:
        one = Bench(is_async=True)
        faults = FakeFaults.parse(f"is_async=1,eog_period=97{card and f',device={card}'}")
        one.backend = FakeBackend(num_cells=1024, n_ctx=128, faults=faults)
        one.timer = timer
        spec = ModelSpec(id="m", path="fake:", num_slots=3)
        one.runner = SlotRunner(spec, one.backend, timer, one.runner.scheduler.allocator.cache, one.jobs)
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("cards", "most"), [(("left", "right"), 2), (("left", "left"), 1), (("", "left"), 1), (("", ""), 1)]
)
def test_as_many_steps_are_in_flight_as_there_are_devices(cards: tuple[str, str], most: int) -> None:
    """Q20: and the answers are those of each model alone."""
    alone = Bench(is_async=True)
    alone.submit("a")
    alone.finish()
    both, in_flight = on_cards(*cards), []
    for one in both:
        one.submit("a")
    while any(one.runner.has_work for one in both):
        for one in both:
            one.turn()
            in_flight.append(len(one.timer.in_flight))
    assert max(in_flight) == most
    for one in both:
        one.finish()
        assert one.answers() == alone.answers()


def test_the_step_that_is_latest_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q20, L3: whichever began last; each is timed by itself."""
    clock = Stopwatch(10.0)
    times = itertools.chain([0.0, 5.0, 6.0, 7.0, 7.5])
    monkeypatch.setattr(clock, "now", lambda: next(times))
    clock.begin(1, LEFT)
    clock.begin(2, RIGHT)
    spent_s, limit_s = clock.read()
    assert (spent_s, limit_s) == (6.0, 60.0)
    assert clock.end(1, LEFT) == 7.0
    assert clock.end(2, RIGHT) == 2.5
    assert clock.busy_s == 9.5


def test_a_step_that_may_compute_anywhere_waits_for_all() -> None:
    """Q20: an encoder, or a model that is computed by the CPU; and one over both devices."""
    timer, waited = StepTimer(Stopwatch(10.0)), []
    for place in (EVERYWHERE, LEFT | RIGHT):
        for device in (LEFT, RIGHT):
            timer.in_flight[device] = partial(waited.append, device)
        timer.begin(1, place)
    assert waited == [LEFT, RIGHT] * 2


@pytest.mark.parametrize(
    ("cards", "order"), [(("left", "right"), "lrlrlrlr"), (("left", "left"), "lrrrrrrr")]
)
def test_models_on_devices_of_their_own_take_turns_whatever_theirs_take(
    cards: tuple[str, str], order: str
) -> None:
    """Q20: by time the one that was waited for came second twice, and its card stood still meanwhile."""
    both = on_cards(*cards)
    runners = Runners(both[0].timer, both[0].runner.scheduler.allocator.cache)
    for name, one in zip("lr", both, strict=True):
        one.runner.spec = msgspec.structs.replace(one.runner.spec, id=name)
        runners.add(one.runner)
        one.submit("a")
    found = ""
    for _ in order:
        runner = runners.next_with_work(0.0)
        assert runner is not None
        found += runner.spec.id
        runner.schedule(0.0)
        runner.step(0.0)
        runners.served(runner, 1.0 if runner.spec.id == "l" else 0.1)
    assert found == order
    for one in both:
        one.finish()


def test_who_had_the_machine_alone_for_long_shares_it_then() -> None:
    """SPEC Q13, Q20: one that came to a card had every turn for as long as the other had had it alone."""
    both = on_cards("left", "left")
    runners = Runners(both[0].timer, both[0].runner.scheduler.allocator.cache)
    for name, one in zip("lr", both, strict=True):
        one.runner.spec = msgspec.structs.replace(one.runner.spec, id=name)
        runners.add(one.runner)
    found = ""
    for turn in range(80):
        if turn in {0, 40}:
            both[turn // 40].submit("a", max_tokens=200)
        runner = runners.next_with_work(0.0)
        assert runner is not None
        found += runner.spec.id
        runner.schedule(0.0)
        runner.step(0.0)
        runners.served(runner, 1.0)
    assert found[:40] == "l" * 40
    assert 18 <= found[40:].count("l") <= 22
    for one in both:
        one.finish()


def order_of_turns(monkeypatch: pytest.MonkeyPatch, num_turns: int, *times: Iterable[float]) -> str:
    """Which of two models on cards of their own, `l` and `r`, has each turn; how many seconds steps take."""
    now, both = [0.0], on_cards("left", "right")
    monkeypatch.setattr(Stopwatch, "now", staticmethod(lambda: now[0]))
    runners = Runners(both[0].timer, both[0].runner.scheduler.allocator.cache)
    for name, one, steps_s in zip("lr", both, times, strict=True):
        one.runner.spec = msgspec.structs.replace(one.runner.spec, id=name)
        monkeypatch.setattr(one.backend, "launch", taking(iter(steps_s), now, one.backend.launch))
        runners.add(one.runner)
        one.submit("a", max_tokens=100)
    found = ""
    for _ in range(num_turns):
        runner = runners.next_with_work(now[0])
        assert runner is not None
        found += runner.spec.id
        runner.schedule(now[0])
        runner.step(now[0])
    for one in both:
        one.finish()
    return found


def taking(
    steps_s: Iterator[float], now: list[float], launch: Callable[[BatchPlan], InFlight]
) -> Callable[[BatchPlan], InFlight]:
    """A launch whose steps are over so many seconds later; who waits for rows is there then."""

    def launched(plan: BatchPlan) -> InFlight:
        step, over_s = launch(plan), now[0] + next(steps_s)
        rows = step.rows

        def waited() -> Rows:
            now[0] = max(now[0], over_s)
            return rows()

        step.rows = waited  # type: ignore[method-assign]
        return step

    return launched


def test_short_steps_of_one_device_do_not_wait_for_the_long_ones_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SPEC Q20: the next turn is that of the step which is over first."""
    found = order_of_turns(monkeypatch, 90, itertools.repeat(0.005), itertools.repeat(0.1))
    between = [len(part) for part in found.split("r")[-4:-1]]
    assert min(between) >= 18


def test_a_step_that_is_asked_for_late_does_not_count_as_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC Q20: a cold one was followed by one asked for as late, which seemed to take as long."""
    cold_first = itertools.chain([0.3] * 2, itertools.repeat(0.02))
    found = order_of_turns(monkeypatch, 90, itertools.repeat(0.01), cold_first)
    between = [len(part) for part in found.split("r")[4:-1]]
    assert len(between) > 10
    assert max(between) <= 3
