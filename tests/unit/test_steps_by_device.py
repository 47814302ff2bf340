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
from stoker.engine.runners.runner import ModelRunner
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.turns import Runners
from stoker.engine.threads.timer import EVERYWHERE, StepTimer, Stopwatch
from stoker.ipc.model import ModelSpec
from stoker.scheduler.cost import StepCost

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


def runners_of(both: Iterable[Bench]) -> Runners:
    """The two of them as one engine has them, `l` and `r`."""
    left, right = both
    runners = Runners(left.timer, left.runner.scheduler.allocator.cache)
    for name, one in zip("lr", (left, right), strict=True):
        one.runner.spec = msgspec.structs.replace(one.runner.spec, id=name)
        runners.add(one.runner)
    return runners


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
    runners = runners_of(both)
    for one in both:
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
    runners = runners_of(both)
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


class Apart:
    """Two models on cards of their own, `l` and `r`; steps take the given seconds of a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *times: Iterable[float]) -> None:
        self.now = now = [0.0]
        self.both = on_cards("left", "right")
        monkeypatch.setattr(Stopwatch, "now", staticmethod(lambda: now[0]))
        self.runners = runners_of(self.both)
        for one, steps_s in zip(self.both, times, strict=True):
            monkeypatch.setattr(one.backend, "launch", taking(iter(steps_s), now, one.backend.launch))
            one.submit("a", max_tokens=100)

    def turn(self, runner: ModelRunner | None) -> str:
        """One turn of that model; returns its name."""
        assert runner is not None
        runner.schedule(self.now[0])
        runner.step(self.now[0])
        return runner.spec.id

    def order(self, num_turns: int) -> str:
        """Which of them has each of the next turns."""
        found = "".join(self.turn(self.runners.next_with_work(self.now[0])) for _ in range(num_turns))
        for one in self.both:
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
    found = Apart(monkeypatch, itertools.repeat(0.005), itertools.repeat(0.1)).order(90)
    between = [len(part) for part in found.split("r")[-4:-1]]
    assert len(between) == 3
    assert 18 <= min(between) <= max(between) <= 22


def test_a_step_that_is_asked_for_late_does_not_count_as_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC Q20: a cold one was followed by one asked for as late, which seemed to take as long."""
    cold_first = itertools.chain([0.3] * 2, itertools.repeat(0.02))
    found = Apart(monkeypatch, itertools.repeat(0.01), cold_first).order(90)
    between = [len(part) for part in found.split("r")[4:-1]]
    assert len(between) > 10
    assert max(between) <= 3


def test_late_steps_teach_only_that_they_are_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SPEC Q20: whatever the other model kept the host from asking for it is none of its time."""
    apart = Apart(monkeypatch, itertools.repeat(0.1), itertools.repeat(0.02))
    left, right = (one.runner for one in apart.both)
    for name in "lrrrrr" + "lr" * 25:
        apart.turn(left if name == "l" else right)
    assert right.scheduler.cost.predict(1) == pytest.approx(0.02)
    assert right.scheduler.cost.slowdown.times == 1.0
    for one in apart.both:
        one.finish()


def test_what_is_known_by_late_steps_alone_is_learned_from_them() -> None:
    """SPEC Q20: a bound is better than nothing, and the next quicker one takes its place."""
    timer = StepTimer(Stopwatch(60.0))
    model = timer.join(FakeBackend(faults=FakeFaults.parse("is_async=1,device=left")), StepCost())
    for took_s, expected_s in ((0.3, 0.3), (0.4, 0.3), (0.1, 0.1), (0.2, 0.1)):
        timer.note(model, 1, took_s, is_bound=True)
        timer.learn()
        assert model.cost.predict(1) == pytest.approx(expected_s)


@pytest.mark.parametrize(("cards", "due_s"), [("right", 0.3), ("right", 0.005), ("left", 0.3)])
def test_a_model_that_waits_for_a_crowd_begins_when_that_is_over(
    monkeypatch: pytest.MonkeyPatch, cards: str, due_s: float
) -> None:
    """SPEC Q22: not at the end of a long step of another; and on the same card it does not wait at all."""
    both = on_cards("left", cards)
    runners = runners_of(both)
    for one in both:
        one.submit("a")
    left, right = (one.runner for one in both)
    left.schedule(0.0)
    left.step(0.0)
    left.flight.due_s = due_s
    held = {"l": 0.0, "r": 0.012}
    found = [runners.next_with_work(now, lambda runner: held[runner.spec.id]) for now in (0.0, 0.012)]
    if cards == "left":
        assert found[0] is not None
    else:
        assert found[0] is (None if due_s > 0.012 else left)
        assert due_s < 0.012 or found[1] is right
    for one in both:
        one.finish()
