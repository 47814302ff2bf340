"""A gate's engine over scripted machines: where requests go, and what becomes of them when machines go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from stoker.errors import QueueFullError, ServerLostError, StepFailedError, StokerError
from stoker.gate.breaker import Breaker, Gauge
from stoker.gate.engine import PeersEngine
from stoker.gate.link import PeerLook
from stoker.gate.prompts import chain_of
from stoker.gate.site import Site
from stoker.ipc.commands import Cancel, KnowModel, LoadModel, Pause, Submit, Suspend, UnloadModel
from stoker.ipc.events import Admitted, Delta, Event, Failed, Finished, ModelState, Parked, Queued
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.ipc.status import EngineHealth, EngineStatus, ModelStatus, RuntimeStatus
from stoker.ipc.usage import Timings, Usage
from stoker.remote.wire import Overview
from stoker.routing.peers import RouteRequest
from stoker.settings import EngineSettings

MODEL = "m"
LOST = ServerLostError("the machine was lost")


def look(**changed: Any) -> PeerLook:
    """A machine that serves MODEL."""
    info = ModelInfo(
        id=MODEL, path="", n_ctx=64, n_batch=8, num_slots=2, num_threads=1, kv_type="", n_vocab=9,
        vocabulary_sample=changed.get("vocabulary", "v"),
    )  # fmt: skip
    overview = Overview(
        is_ready=changed.get("is_ready", True),
        is_suspended=changed.get("is_suspended", False),
        health=EngineHealth(state=changed.get("state", "serving")),
        models=[info],
        states=[ModelStatus(id=MODEL, state=changed.get("life", "ready"))],
    )
    engine = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)
    health = overview.health
    status = RuntimeStatus(
        pid=1, state="serving", restarts=0, label="", threads=1, engine=engine, health=health
    )
    return PeerLook(overview=overview, status=status)


@dataclass
class ScriptedRun:
    """A request on a scripted machine, which says what the test has it say."""

    submit: Submit
    say_all: Callable[[list[Any]], None]
    end: Callable[[StokerError | None], None]
    silent_s: float = 0.0
    is_abandoned: bool = False

    def abandon(self) -> None:
        """The gate leaves it."""
        self.is_abandoned = True

    def say(self, *tokens: int, reason: FinishReason | None = None, mu: float | None = None) -> None:
        """A delta of choice 0."""
        said = Delta(
            request_id=self.submit.request_id,
            index=0,
            text="".join(map(str, tokens)),
            token_ids=list(tokens),
            finish_reason=reason,
            mirostat_mu=mu,
        )
        self.say_all([said])

    def finish(self) -> None:
        """The terminal event, and the end of the answer."""
        num = sum(map(len, self.submit.generated))
        usage = Usage(prompt_tokens=3, completion_tokens=num)
        self.say_all([Finished(request_id=self.submit.request_id, usage=usage, timings=Timings())])
        self.end(None)


@dataclass
class ScriptedLink:
    """A machine."""

    name: str
    answer: PeerLook | StokerError = field(default_factory=look)
    runs: list[ScriptedRun] = field(default_factory=list)
    key: str = ""
    is_closed: bool = False
    steered: list[tuple[str, str]] = field(default_factory=list)
    operated: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it would be."""
        return f"http://{self.name}"

    async def look(self) -> PeerLook:
        """What the test says."""
        if isinstance(self.answer, StokerError):
            raise self.answer
        return self.answer

    def run(self, submit: Submit, on_events: Any, on_end: Any) -> ScriptedRun:
        """Note it."""
        self.runs.append(ScriptedRun(submit, on_events, on_end))
        return self.runs[-1]

    async def ask(self, question: Any) -> dict[str, Any]:
        """An answer."""
        return {"tokens": [1], "pieces": [b"a"]}

    async def steer(self, request_id: str, action: str) -> None:
        """Note it."""
        self.steered.append((request_id, action))

    async def operate(self, action: str, body: dict[str, Any]) -> None:
        """A load makes it ready."""
        self.operated.append(action)
        self.answer = look()

    def take_key(self, other: Any) -> None:
        """Note it."""
        self.key = other.key

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True


@dataclass
class Bench:
    """An engine over two machines, and what its client was told."""

    site: Site
    engine: PeersEngine
    links: list[ScriptedLink]
    told: list[Event] = field(default_factory=list)

    def submit(self, request_id: str = "r", **fields: Any) -> None:
        """Ask for a request."""
        sampling = Sampling(seed=5)
        request = GenerateRequest(prompt="Tell me", model=MODEL, max_tokens=8, sampling=sampling, **fields)
        self.engine.send(Submit(request_id=request_id, request=request))

    @property
    def run(self) -> ScriptedRun:
        """The one request that a machine has and the gate has not left."""
        (run,) = [run for link in self.links for run in link.runs if not run.is_abandoned]
        return run

    @property
    def link(self) -> ScriptedLink:
        """The machine that has it."""
        return next(link for link in self.links if self.run in link.runs)

    @property
    def other(self) -> ScriptedLink:
        """The other machine."""
        return next(link for link in self.links if link is not self.link)

    async def settle(self) -> None:
        """Let what was begun come to its end."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def turn(self, link: ScriptedLink, answer: PeerLook | StokerError) -> None:
        """A machine is otherwise from now on, and is asked."""
        link.answer = answer
        await self.site.ask_now(link.name)
        await self.settle()

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of a kind."""
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def tokens(self) -> list[int]:
        """All that its client was given, in order."""
        return [token for delta in self.of(Delta) for token in delta.token_ids]

    @property
    def ends(self) -> list[Event]:
        """Terminal events."""
        return [*self.of(Finished), *self.of(Failed)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Two machines that serve."""
    links = [ScriptedLink("a"), ScriptedLink("b")]
    site = Site(links)
    engine = PeersEngine(site, EngineSettings(peer_grace_s=0.0, peer_wait_s=0.0))
    found = Bench(site, engine, links)
    await engine.start(found.told.extend)
    for link in links:
        await site.ask_now(link.name)
    yield found
    engine.kill()
    await site.close()


async def test_a_request_goes_on_from_its_tokens_at_another_machine(bench: Bench) -> None:
    """P7: same seed, every token once, one end."""
    bench.submit()
    first, lost = bench.run, bench.link
    first.say_all([Admitted("r", prompt_tokens=3, slot=1)])
    first.say(1, mu=0.5)
    first.say(2, 3, mu=0.7)
    first.end(LOST)
    assert bench.run.submit.generated == [[1, 2, 3]]
    assert bench.run.submit.mirostat_mu == [0.7]
    assert bench.run.submit.vocabulary_sample == "v"
    assert bench.run.submit.request.sampling.seed == 5
    assert bench.run.submit.request_id == "r.hop2"
    assert bench.link is not lost
    first.say(9)  # what a lost machine still says counts for nothing
    bench.run.say(4, reason=FinishReason.LENGTH)
    bench.run.finish()
    await bench.settle()
    assert bench.tokens == [1, 2, 3, 4]
    assert {event.request_id for event in bench.of(Delta)} == {"r"}
    assert len(bench.of(Parked)) == 1
    assert bench.ends == bench.of(Finished)
    assert len(bench.ends) == 1


async def test_a_return_has_the_slot_of_the_machine_that_it_is_at(bench: Bench) -> None:
    """P11: slots of a site have a number each; who took one is named as the gate's clients know it."""
    bench.submit()
    first, lost = bench.run, bench.link
    first.say_all([Admitted("r", prompt_tokens=3, slot=1)])
    first.say(1)
    first.end(LOST)
    park = Parked(request_id="r.hop2", index=0, form="cells", reason="gave its slot to x.hop3", by="x.hop3")
    bench.run.say_all([Admitted("r.hop2", prompt_tokens=3, slot=1), park])
    await bench.settle()
    shown = {one.name: one.slots for one in bench.engine._status().machines}
    (here, _), (there, _) = shown[lost.name][MODEL], shown[bench.link.name][MODEL]
    assert sorted((here, there)) == [0, 2]
    assert [event.slot for event in bench.of(Admitted)] == [here + 1, there + 1]
    assert (bench.of(Parked)[-1].by, bench.of(Parked)[-1].reason) == ("x", "gave its slot to x")


async def test_a_machine_that_has_more_slots_than_before_gets_other_numbers(bench: Bench) -> None:
    """P11: those that follow its own are another machine's."""
    first, second = bench.site
    assert [bench.site.slot_base(one, MODEL) for one in (first, second)] == [0, 2]
    assert first.look is not None
    (info,) = first.look.overview.models
    first.look.overview.models[:] = [msgspec.structs.replace(info, num_slots=3)]
    assert [bench.site.slot_base(one, MODEL) for one in (first, second)] == [4, 2]
    assert first.status(0, 0.0).slots == {MODEL: (4, 3)}


async def test_a_machine_that_sheds_is_no_end_of_a_request(bench: Bench) -> None:
    """P8: another is asked before its first token; its client hears of nothing, or of the last refusal."""
    bench.submit()
    bench.run.end(QueueFullError("full", retry_after_s=3.0))
    assert bench.run.submit.generated == []
    bench.run.end(QueueFullError("full too", retry_after_s=4.0))
    await bench.settle()
    (failed,) = bench.of(Failed)
    assert failed.error.code == "queue_full"
    assert not bench.of(Delta)


async def test_a_fault_of_the_request_is_told_at_once(bench: Bench) -> None:
    """P8: what another machine would refuse as well is not asked of it."""
    bench.submit()
    bench.run.say(1)
    run = bench.run
    run.say_all([Failed(run.submit.request_id, StepFailedError("no").info())])
    await bench.settle()
    assert [event.error.code for event in bench.of(Failed)] == ["step_failed"]
    assert sum(len(link.runs) for link in bench.links) == 1


@pytest.mark.parametrize(
    "answer", [look(is_ready=False), look(state="closing", is_ready=False), look(is_suspended=True), None]
)
async def test_a_machine_that_is_drained_or_sleeps_hands_its_requests_over(
    bench: Bench, answer: PeerLook | None
) -> None:
    """P7: as soon as it says so, or does not answer twice; it is told to leave them."""
    bench.submit()
    first, machine = bench.run, bench.link
    first.say(1)
    for _ in range(2):
        await bench.turn(machine, answer or LOST)
    assert first.is_abandoned
    assert bench.run.submit.generated == [[1]]
    assert bench.link is not machine


async def test_a_request_stays_where_no_other_machine_can_go_on(bench: Bench) -> None:
    """P7: a machine that sleeps keeps it, if the other is gone."""
    bench.submit()
    bench.run.say(1)
    await bench.turn(bench.other, look(is_ready=False))
    await bench.turn(bench.link, look(is_suspended=True))
    assert not bench.run.is_abandoned
    assert not bench.ends


async def test_an_answer_that_a_machine_cuts_short_as_it_ends_goes_on(bench: Bench) -> None:
    """P7: an end as cancelled that nobody asked for is one only where the machine stays."""
    bench.submit()
    bench.run.say(1)
    bench.link.answer = look(is_ready=False)
    bench.run.say(reason=FinishReason.CANCELLED)
    first = bench.run
    first.finish()
    await bench.settle()
    assert bench.run is not first
    bench.run.say(2)
    bench.run.say(reason=FinishReason.CANCELLED)  # this one was cancelled by somebody there
    bench.run.finish()
    await bench.settle()
    assert bench.tokens == [1, 2]
    assert bench.of(Delta)[-1].finish_reason is FinishReason.CANCELLED
    assert len(bench.ends) == 1


async def test_tokens_of_another_vocabulary_go_on_nowhere(bench: Bench) -> None:
    """P9: a typed error, not another text."""
    bench.submit()
    await bench.turn(bench.other, look(vocabulary="another"))
    bench.run.say(1)
    bench.run.end(LOST)
    await bench.settle()
    (failed,) = bench.of(Failed)
    assert failed.error.code == "vocabulary_mismatch"
    assert sum(len(link.runs) for link in bench.links) == 1


@asynccontextmanager
async def five_machines() -> AsyncIterator[Bench]:
    """An engine over machines enough to lose some."""
    links = [ScriptedLink(name) for name in "abcde"]
    site = Site(links)
    engine = PeersEngine(site, EngineSettings())
    found = Bench(site, engine, links)
    await engine.start(found.told.extend)
    for link in links:
        await site.ask_now(link.name)
    yield found
    engine.kill()
    await site.close()


async def test_a_request_that_takes_machines_with_it_gets_no_fourth() -> None:
    """P7: three machines lost without a token between them convict it."""
    async with five_machines() as found:
        found.submit()
        for _ in range(3):
            found.run.say_all([Queued(found.run.submit.request_id, 0)])
            found.run.end(LOST)
        await found.settle()
        assert [event.error.code for event in found.of(Failed)] == ["engine_crashed"]
        assert sum(len(link.runs) for link in found.links) == 3


async def test_a_request_that_gets_tokens_between_lost_machines_goes_on() -> None:
    """P7: what it lost before its last token is not charged to it."""
    async with five_machines() as found:
        found.submit()
        for token in range(4):
            found.run.say(token)
            found.run.end(LOST)
        await found.settle()
        assert not found.ends
        assert found.run.submit.generated == [[0, 1, 2, 3]]


async def test_a_request_whose_machine_is_lost_behind_its_last_token_ends_here(bench: Bench) -> None:
    """P7: nothing is left to compute, so no other machine is asked; the gate tells the end itself."""
    bench.submit()
    bench.run.say(1)
    bench.run.say(2, reason=FinishReason.LENGTH)
    bench.run.end(LOST)
    await bench.settle()
    assert bench.tokens == [1, 2]
    assert bench.ends == bench.of(Finished)
    assert [end.usage.completion_tokens for end in bench.of(Finished)] == [2]
    assert sum(len(link.runs) for link in bench.links) == 1


async def test_models_stay_while_all_machines_are_replaced(bench: Bench) -> None:
    """P10: none of the new ones has said what it has, and callers still find what was served."""
    before = bench.site.infos()
    assert before
    changes: list[int] = []
    bench.site.on_models = lambda: changes.append(1)
    bench.site.replace([ScriptedLink("c")])
    assert [one.link.name for one in bench.site] == ["c"]
    assert (bench.site.infos(), changes) == (before, [])
    await bench.site.ask_now("c")
    assert [info.id for info in bench.site.infos()] == [info.id for info in before]


async def test_a_machine_that_stays_is_reached_with_the_key_that_it_has_now(bench: Bench) -> None:
    """P10: by the link that there is, which has its requests; it is asked at once how it is."""
    now = [ScriptedLink("a", key="new"), ScriptedLink("b")]
    for machine in bench.site:
        machine.wakes.clear()
    bench.site.replace(now)
    assert [machine.wakes.is_set() for machine in bench.site] == [True, True]
    await bench.settle()
    assert [machine.link for machine in bench.site] == bench.links
    assert [link.key for link in bench.links] == ["new", ""]
    assert [link.is_closed for link in (*bench.links, *now)] == [False, False, True, True]


async def test_a_cancel_ends_it_here_and_there(bench: Bench) -> None:
    """P7: one end, and the machine is told."""
    bench.submit(n=2)
    first = bench.run
    first.say(1)
    bench.engine.send(Cancel("r"))
    await bench.settle()
    assert first.is_abandoned
    assert [delta.finish_reason for delta in bench.of(Delta)[1:]] == [FinishReason.CANCELLED] * 2
    assert len(bench.of(Finished)) == 1


async def test_a_paused_request_stands_still_at_the_next_machine_too(bench: Bench) -> None:
    """P7: it is given paused."""
    bench.submit()
    bench.run.say(1)
    bench.engine.send(Pause("r"))
    await bench.settle()
    assert bench.link.steered == [("r", "pause")]
    bench.run.end(LOST)
    assert bench.run.submit.is_paused


async def test_the_client_gets_its_requests_back_when_the_gate_sleeps(bench: Bench) -> None:
    """P7: nothing ends, and every machine is left."""
    bench.submit()
    first = bench.run
    bench.engine.send(Suspend(1.0))
    assert first.is_abandoned
    assert (await bench.engine.wait()).status == 0
    assert not bench.ends


async def test_a_model_is_ready_where_any_machine_has_it(bench: Bench) -> None:
    """P10: and a load goes to one machine."""
    bench.engine.send(KnowModel(ModelSpec(id=MODEL, path="")))
    await bench.settle()
    assert [event.state for event in bench.of(ModelState)] == ["loading", "ready"]
    assert bench.of(ModelState)[-1].info.num_slots == 4
    for link in bench.links:
        await bench.turn(link, look(life="absent"))
    assert bench.of(ModelState)[-1].state == "absent"
    bench.engine.send(LoadModel(ModelSpec(id=MODEL, path=""), ask_id=7))
    await bench.settle()
    assert [link.operated for link in bench.links].count(["load"]) == 1
    assert bench.of(ModelState)[-1].state == "ready"
    bench.engine.send(UnloadModel(MODEL, ask_id=8))
    await bench.settle()
    assert [event.answers for event in bench.of(ModelState)[-3:]] == [0, 7, 8]


async def test_no_machine_is_a_typed_error_that_names_each(bench: Bench) -> None:
    """P8: of a request that no machine had."""
    for link in bench.links:
        await bench.turn(link, look(is_ready=False))
    bench.submit()
    await bench.settle()
    (failed,) = bench.of(Failed)
    assert failed.error.code == "no_machine"
    assert set(failed.error.details["machines"]) == {"a", "b"}


def test_a_machine_that_failed_is_tried_by_one_request() -> None:
    """P8: back-off, then one trial, then as any other."""
    breaker = Breaker()
    breaker.answered()
    assert breaker.state is Gauge.CLOSED
    breaker.worked()
    breaker.lost("gone")
    pauses = []
    for _ in range(4):
        breaker.silent("gone")
        pauses.append(breaker.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert not breaker.takes
    breaker.answered()
    assert breaker.takes
    trial, older = object(), object()
    breaker.began(trial)
    breaker.ended(older)
    assert not breaker.takes
    breaker.worked()
    assert breaker.takes


@pytest.mark.parametrize("older", [look(life="absent"), LOST], ids=["answers", "fails"])
async def test_what_a_machine_was_before_what_is_known_of_it_is_not_taken(
    bench: Bench, older: PeerLook | StokerError
) -> None:
    """P8, P10: an older look that ends later takes no newer one back, and no loss."""
    link, machine = bench.links[0], bench.site.machine("a")
    assert machine is not None

    @asynccontextmanager
    async def meanwhile() -> AsyncIterator[None]:
        is_answered = asyncio.Event()

        async def late() -> PeerLook:
            await is_answered.wait()
            if isinstance(older, StokerError):
                raise older
            return older

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, "look", late)
            asked = asyncio.create_task(bench.site.ask_now("a"))
            await bench.settle()
        yield
        is_answered.set()
        await asked

    async with meanwhile():
        await bench.site.ask_now("a")
    assert (machine.life(MODEL), machine.breaker.is_refused) == ("ready", False)
    machine.breaker.silent("once")
    assert machine.breaker.state is Gauge.CLOSED  # it is the first failure
    async with meanwhile():
        bench.site.lost("a", LOST)
    assert machine.breaker.state is Gauge.OPEN


async def test_a_trial_that_ended_before_it_was_heard_of_is_followed_by_another(bench: Bench) -> None:
    """P8: its caller has left, or the machine has refused it: a machine is not on trial for ever."""
    bench.site.worked("a")
    bench.site.lost("a", LOST)
    assert not bench.site.takes("a")
    await bench.turn(bench.links[0], look())
    route = RouteRequest(model=MODEL)
    for _ in range(3):
        assert bench.site.takes("a")
        bench.site.began(route, "a")
        assert not bench.site.takes("a")
        bench.site.ended(route, "a")
    bench.site.began(route, "a")
    bench.site.worked("a")
    assert bench.site.takes("a")


def test_the_turns_of_a_conversation_are_the_beginning_of_its_next_request() -> None:
    """P1: what a template wrote before is hashed alike; another key's is not."""

    def asked(*turns: str, salt: str = "", system: str = "") -> tuple[int, ...]:
        told = [*([f"<|im_start|>system\n{system}"] if system else []), *turns]
        text = "".join(f"{turn}<|im_end|>\n" for turn in told) + "<|im_start|>assistant\n"
        return chain_of(GenerateRequest(prompt=text, model=MODEL, cache_salt=salt))

    user, answer, again = "<|im_start|>user\nHi", "<|im_start|>assistant\nHello", "<|im_start|>user\nMore"
    for system in ("", "Be short.", "x" * 2000):
        first, second = asked(user, system=system), asked(user, answer, again, system=system)
        assert second[: len(first)] == first
        assert asked(user, system=system, salt="other") != first
    assert asked(user) != asked(again)
    tokens = tuple(range(600))
    blocks = chain_of(GenerateRequest(prompt=tokens, model=MODEL))
    assert chain_of(GenerateRequest(prompt=tokens[:512], model=MODEL)) == blocks
    assert msgspec.json.encode(blocks)
