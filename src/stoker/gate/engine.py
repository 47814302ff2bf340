"""An engine that is other machines: commands of the client in, events of its requests out.

Stands where an engine's process stands, as a `Transport`: all that the client does for an engine it does for
this one. Requests are given to machines by the router. One whose machine is lost, is drained, sleeps or sheds
goes on at another from its tokens, and its client sees a pause. Runs on the client's own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.client.process.transport import ExitReport
from stoker.errors import (
    EngineCrashedError,
    ModelNotFoundError,
    NoMachineError,
    NotReadyError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    ServerLostError,
    StokerError,
    UnsupportedError,
    VocabularyMismatchError,
    error_from_info,
)
from stoker.gate.carrier import StateCarrier
from stoker.gate.journey import MAX_CHARGES, Journey
from stoker.gate.models import SiteModels
from stoker.gate.states import figures_of, site_status
from stoker.ipc.commands import (
    Cancel,
    Command,
    CountTokens,
    Detokenize,
    ExportState,
    GetStatus,
    ImportState,
    KnowModel,
    LoadModel,
    LostDevices,
    Pause,
    PinModel,
    Resume,
    Shutdown,
    Submit,
    Suspend,
    Tokenize,
    UnloadModel,
    Watch,
)
from stoker.ipc.events import Delta, Event, Failed, Finished, Hello, Paused, Reply, RequestEvent, Resumed
from stoker.ipc.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from stoker.client.process.transport import EventSink
    from stoker.gate.site import Machine, Site
    from stoker.ipc.commands import TextQuestion
    from stoker.ipc.status import EngineStatus
    from stoker.settings import EngineSettings

log = logging.getLogger(__name__)

TICK_S = 0.25
QUIET_S = 20.0
"""Four beats of a machine: past that it has lost a request, whatever its connection says."""
FIGURES_EVERY = 4
_MOVES = frozenset(
    {
        "server_lost",
        "not_ready",
        "queue_full",
        "server_busy",
        "rate_limit_exceeded",
        "kv_pool_full",
        "step_out_of_memory",
        "insufficient_memory",
        "model_too_large",
        "model_not_found",
        "model_load_failed",
        "model_load_crashed",
        "model_file_invalid",
        "too_hot",
        "device_busy",
        "backend_unavailable",
        "machine_setup",
        "operator_only",
        "invalid_api_key",
        "forbidden",
        "vocabulary_mismatch",
    }
)
"""Codes of errors that are a machine's: another may do better. What else a request fails with is its own."""


class PeersEngine:
    """See the module.

    Args:
        site: the machines.
        settings: the engine's; `peer_grace_s` and `peer_wait_s` are this class's.
    """

    can_kill = False

    def __init__(self, site: Site, settings: EngineSettings) -> None:
        self._site = site
        self._grace_s, self._wait_s = settings.peer_grace_s, settings.peer_wait_s
        self._journeys: dict[str, Journey] = {}
        self._models = SiteModels(site, self._publish)
        self._carrier = StateCarrier()
        self._num_moved = 0
        self._out: list[Event] = []
        self._on_events: EventSink = lambda events: None  # noqa: ARG005 - until it is started
        self._exit: asyncio.Future[ExitReport] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_watched = False
        self._num_ticks = 0
        self._leaves_at: float | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<PeersEngine {len(self._journeys)} requests, {self._site!r}>"

    # ------------------------------------------------------------ a transport

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def start(self, on_events: EventSink) -> None:
        """See `Transport.start`."""
        self._exit = self._loop.create_future()
        self._on_events = on_events
        self._site.on_change = self._site_changed
        self._do(self._tick())
        self._publish(Hello(os.getpid()))

    async def wait(self) -> ExitReport:
        """See `Transport.wait`."""
        assert self._exit is not None, "wait() before start()"
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """Leave every request where it is; the client has them."""
        self._leave()

    def send(self, command: Command) -> None:
        """See `Transport.send`."""
        if self._exit is None or self._exit.done():
            return
        match command:
            case Submit():
                journey = self._journeys[command.request_id] = Journey(command, self._loop.time())
                self._place(journey)
            case Cancel() | Pause() | Resume():
                self._steered(command)
            case Tokenize() | Detokenize() | CountTokens():
                self._do(self._ask(command))
            case GetStatus(call_id=call_id):
                self._publish(Reply(call_id=call_id, value={"status": self._status()}))
            case KnowModel() | LoadModel() | UnloadModel() | PinModel():
                self._do(self._models.carry_out(command))
            case ExportState(call_id=call_id) | ImportState(call_id=call_id):
                error = UnsupportedError("a gate computes nothing: its states are its machines'")
                self._publish(Reply(call_id=call_id, error=error.info()))
            case Watch() | Shutdown() | Suspend() | LostDevices():
                self._control(command)

    def _control(self, command: Watch | Shutdown | Suspend | LostDevices) -> None:
        match command:
            case Watch(is_watched=is_watched):
                self._is_watched, self._num_ticks = is_watched, 0
            case Shutdown(drain_s=drain_s):
                self._leaves_at = self._loop.time() + drain_s
                self._end_if_drained()
            case Suspend():
                self._leave()

    def _steered(self, command: Cancel | Pause | Resume) -> None:
        journey = self._journeys.get(command.request_id)
        if journey is None:
            return
        if isinstance(command, Cancel):
            self._end(journey, *journey.cancelled())
        else:
            self._pause(journey, is_paused=isinstance(command, Pause))

    def _status(self) -> EngineStatus:
        """The machines as one engine."""
        counters = {"requests_moved_total": self._num_moved, **self._carrier.stats()}
        return site_status(self._site, self._journeys.values(), counters, self._loop.time())

    def _leave(self) -> None:
        """End, with whatever was published before delivered; requests stay the client's."""
        if self._exit is None or self._exit.done():
            return
        for journey in self._journeys.values():
            self._abandon(journey)
        self._journeys.clear()
        for task in self._tasks:
            task.cancel()
        self._site.on_change = lambda: None
        self._flush()
        self._exit.set_result(ExitReport(0))

    def _end_if_drained(self) -> None:
        if self._leaves_at is None:
            return
        if self._journeys and self._loop.time() < self._leaves_at:
            return
        for journey in list(self._journeys.values()):
            self._end(journey, *journey.cancelled())
        self._leave()

    # ------------------------------------------------------------ events out

    def _publish(self, *events: Event) -> None:
        """Give events to the client, with all that come in this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += events

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:
            self._on_events(out)

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the gate's engine failed", exc_info=error)
            if self._exit is not None and not self._exit.done():
                self._leave_broken()

    def _leave_broken(self) -> None:
        """A fault of ours: the client starts another, which goes on with every request."""
        for journey in self._journeys.values():
            self._abandon(journey)
        if self._exit is not None:
            self._exit.set_result(ExitReport(1))

    # ------------------------------------------------------------ where requests go

    def _place(self, journey: Journey) -> None:
        """Give a request to a machine, or let it wait for one, or refuse it."""
        now = self._loop.time()
        unlike = self._site.names_unlike(journey.request.model, journey.vocabulary)
        peer, journey.goes_to = journey.goes_to, ""
        try:
            if not (peer and peer not in journey.refusals and self._site.takes(peer)):
                peer = self._site.choose(journey.route, {*journey.refusals, *unlike}, now).peer
        except (NoMachineError, ModelNotFoundError) as error:
            self._hold(journey, self._refusal(journey, error, unlike), now)
            return
        machine = self._site.machine(peer)
        assert machine is not None, f"the router chose {peer}, which is not there"
        journey.peer, journey.hop = peer, journey.hop + 1
        journey.has_begun_here, journey.cut = False, []
        self._site.began(journey.route, peer)
        hop = journey.hop
        journey.run = machine.link.run(
            journey.submit(now),
            partial(self._heard, journey, hop),
            partial(self._ended, journey, hop),
        )

    def _hold(self, journey: Journey, error: StokerError, now: float) -> None:
        """No machine may take it now: one that was accepted waits for a while, another is refused."""
        is_over = now - journey.waits_since > self._wait_s
        if not journey.was_accepted or is_over:
            self._end(journey, Failed(journey.request_id, error.info()))
            return
        self._publish(*journey.parked("no machine can go on with it now"))

    def _refusal(self, journey: Journey, error: StokerError, unlike: Collection[str]) -> StokerError:
        """What a request that no machine takes is refused with: what machines said of it, if any did."""
        said = list(journey.refusals.values())
        others = {one.link.name for one in self._site if one.is_up} - journey.refusals.keys()
        if journey.num_tokens and others and others <= set(unlike):
            return VocabularyMismatchError(
                f"{journey.request_id} has {journey.num_tokens} tokens, which mean something else at all"
                f" machines that have {journey.request.model!r} now, {', '.join(sorted(others))}: serve the"
                " same file under one name",
                param="model",
            )
        busy = [one for one in said if isinstance(one, QueueFullError | RateLimitError)]
        if busy or journey.was_accepted or not said:
            return busy[0] if busy else error
        return said[-1]

    def _leave_machine(self, journey: Journey, why: str) -> None:
        """It is to go on elsewhere."""
        if journey.peer and (machine := self._site.machine(journey.peer)):
            machine.num_moved += 1
            self._num_moved += 1
        self._abandon(journey)
        journey.waits_since = self._loop.time()
        self._publish(*journey.parked(why))
        self._place(journey)

    def _abandon(self, journey: Journey) -> None:
        run, journey.run = journey.run, None
        if run is not None:
            run.abandon()
        self._unlink(journey)

    def _unlink(self, journey: Journey) -> None:
        peer, journey.peer, journey.run = journey.peer, None, None
        if peer is not None:
            self._site.ended(journey.route, peer)
            machine = self._site.machine(peer)
            if machine and not (
                machine.is_wanted or any(one.peer == peer for one in self._journeys.values())
            ):
                self._site.forget(peer)

    def _end(self, journey: Journey, *events: Event) -> None:
        """Its last events."""
        self._journeys.pop(journey.request_id, None)
        self._abandon(journey)
        self._publish(*events)
        self._end_if_drained()

    # ------------------------------------------------------------ what machines say

    def _heard(self, journey: Journey, hop: int, events: list[RequestEvent]) -> None:
        """Events of a request, from the machine that has it."""
        if journey.hop != hop or journey.peer is None:
            return
        machine = self._site.machine(journey.peer)
        if machine is None:
            return
        if not journey.has_begun_here:
            journey.has_begun_here = True
            self._began_there(journey, machine)
        for event in events:
            if type(event) is Delta and event.finish_reason is not FinishReason.CANCELLED:
                self._publish(journey.take_delta(event))  # in few calls, as there is one a token
            elif not self._heard_other(journey, hop, machine, event):
                return

    def _heard_other(self, journey: Journey, hop: int, machine: Machine, event: RequestEvent) -> bool:
        """An event that does not come with every token; False: the machine's next ones count no more."""
        match event:
            case Failed(error=error):
                self._failed(journey, error_from_info(error))
                return False
            case Finished() if journey.cut:
                self._do(self._check_end(journey, hop, machine, event))
                return False
            case Delta():
                journey.cut.append(event)  # nobody asked for it here: it may be the machine's own end
                return True
        base = self._site.slot_base(machine, journey.request.model)
        own = journey.take(event, base, machine.link.name)
        self._publish(own)
        if isinstance(own, Finished):
            self._journeys.pop(journey.request_id, None)
        return True

    def _began_there(self, journey: Journey, machine: Machine) -> None:
        """The machine has taken it."""
        self._site.worked(machine.link.name)
        journey.gone_on()
        info = machine.info(journey.request.model)
        if info is not None and info.vocabulary_sample:
            journey.vocabulary = journey.vocabulary or info.vocabulary_sample
        else:
            self._site.look_soon(machine.link.name)
        if journey.is_paused and not journey.num_tokens:  # one without tokens is not given paused
            self._do(self._steer(journey, machine, "pause"))

    async def _check_end(self, journey: Journey, hop: int, machine: Machine, end: Finished) -> None:
        """The machine has cut an answer short: it ends itself, or somebody has cancelled it there."""
        try:
            is_staying = (await machine.link.look()).overview.is_ready
        except StokerError:
            is_staying = False
        if journey.hop != hop or journey.request_id not in self._journeys:
            return
        if is_staying:
            base = self._site.slot_base(machine, journey.request.model)
            last: list[RequestEvent] = [*journey.cut, end]
            self._end(journey, *(journey.take(event, base, machine.link.name) for event in last))
            return
        name = machine.link.name
        journey.refusals[name] = NotReadyError(f"{name} is shutting down")
        self._site.look_soon(name)
        self._leave_machine(journey, f"{name} is shutting down")

    def _ended(self, journey: Journey, hop: int, error: StokerError | None) -> None:
        """The machine has no more to say of it."""
        if journey.hop != hop or journey.peer is None:
            return
        if journey.cut and error is None:
            return  # it is being looked at
        if error is None or journey.request_id not in self._journeys:
            self._unlink(journey)
            self._end_if_drained()
            return
        self._failed(journey, error)

    def _failed(self, journey: Journey, error: StokerError) -> None:
        """The machine could not go on with it: another may, unless it is the request's own fault."""
        peer = journey.peer
        assert peer is not None, f"{journey!r} has failed nowhere"
        if isinstance(error, ServerLostError):
            self._site.lost(peer, error)
            journey.charges += journey.was_accepted
        if journey.is_complete:
            self._end(journey, journey.finished())
            return
        if error.code not in _MOVES:
            self._end(journey, Failed(journey.request_id, error.info()))
            return
        if journey.charges >= MAX_CHARGES:
            text = f"{journey.charges} machines were lost with {journey.request_id}, last: {error.message}"
            crashed = EngineCrashedError(text, crashes=journey.charges, num_tokens=journey.num_tokens)
            self._end(journey, Failed(journey.request_id, crashed.info()))
            return
        log.info("%s goes on elsewhere after %d tokens: %s", journey.request_id, journey.num_tokens, error)
        journey.refusals[peer] = error
        if journey.was_accepted:
            self._leave_machine(journey, error.message)
        else:
            self._abandon(journey)
            self._place(journey)

    # ------------------------------------------------------------ time and the site

    async def _tick(self) -> None:
        """What time brings, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            for journey in list(self._journeys.values()):
                self._look_after(journey, now)
            self._end_if_drained()
            if self._is_watched and self._num_ticks % FIGURES_EVERY == 0:
                self._publish(*figures_of(self._status()))
            self._num_ticks += 1

    def _look_after(self, journey: Journey, now: float) -> None:
        if journey.peer is None:
            left_s = journey.left_s(now)
            if left_s is not None and left_s <= 0:
                text = f"request {journey.request_id} did not finish within {journey.request.timeout_s:g} s"
                self._end(journey, Failed(journey.request_id, RequestTimeoutError(text).info()))
                return
            journey.refusals.clear()
            self._place(journey)
        elif journey.run is not None and journey.run.silent_s > QUIET_S:
            text = f"{journey.peer} said nothing of {journey.request_id} for {QUIET_S:g} s"
            self._failed(journey, ServerLostError(text, num_tokens=journey.num_tokens))

    def _site_changed(self) -> None:
        """A machine has said how it is, or has failed."""
        self._models.tell()
        now = self._loop.time()
        for machine in self._site:
            why = self._why_leave(machine, now)
            if not why:
                self._carrier.stays(machine)
                continue
            self._carrier.begin(machine)
            here = [one for one in self._journeys.values() if one.peer == machine.link.name]
            for journey in here:
                self._hand_over(journey, machine, f"{machine.link.name} {why}")
            if not here:
                self._site.forget(machine.link.name)

    def _why_leave(self, machine: Machine, now: float) -> str:
        """Why requests do not stay on a machine; empty: they do."""
        if not machine.breaker.takes and not machine.is_up:
            return "does not answer"
        if machine.is_draining:
            return "is being drained"
        since = machine.suspended_since
        if since is not None and now - since >= self._grace_s:
            return f"has been suspended for {now - since:.0f} s"
        return ""

    def _hand_over(self, journey: Journey, machine: Machine, why: str) -> None:
        """Take a request from a machine that goes, with what is computed of it where that is quicker."""
        if journey.carried_at == journey.hop:
            return  # its state is on its way
        if (not machine.is_up and not machine.breaker.takes) or not self._carrier.may_carry(journey, machine):
            self._try_elsewhere(journey, why)
            return
        journey.carried_at = journey.hop
        self._do(self._carry(journey, machine, why))

    async def _carry(self, journey: Journey, machine: Machine, why: str) -> None:
        hop = journey.hop
        async with self._carrier.place(machine):
            target = self._target(journey) if self._is_at(journey, hop) else None
            has_state = target is not None and await self._carrier.carry(journey, machine, target)
        if not self._is_at(journey, hop):
            return  # it has ended, or was lost with its machine meanwhile
        journey.carried_at = 0
        if has_state and target is not None:
            journey.goes_to = target.link.name
        self._try_elsewhere(journey, why)

    def _is_at(self, journey: Journey, hop: int) -> bool:
        """Whether it runs where it was."""
        is_live = self._journeys.get(journey.request_id) is journey
        return is_live and journey.hop == hop and journey.peer is not None

    def _target(self, journey: Journey) -> Machine | None:
        """Where it would go on; None: nowhere."""
        unlike = self._site.names_unlike(journey.request.model, journey.vocabulary)
        try:
            choice = self._site.choose(journey.route, {journey.peer or "", *unlike}, self._loop.time())
        except (NoMachineError, ModelNotFoundError):
            return None
        return self._site.machine(choice.peer)

    def _try_elsewhere(self, journey: Journey, why: str) -> None:
        """Take a request from its machine, if another can go on with it."""
        peer = journey.peer
        assert peer is not None, f"{journey!r} is nowhere"
        if self._target(journey) is None:
            return
        journey.refusals[peer] = NotReadyError(why)
        log.info("%s goes on elsewhere after %d tokens: %s", journey.request_id, journey.num_tokens, why)
        self._leave_machine(journey, why)

    # ------------------------------------------------------------ what callers want

    def _pause(self, journey: Journey, *, is_paused: bool) -> None:
        journey.is_paused = is_paused
        machine = self._site.machine(journey.peer) if journey.peer else None
        if machine is None or not journey.has_begun_here:
            told = Paused(journey.request_id) if is_paused else Resumed(journey.request_id)
            self._publish(told)
        else:
            self._do(self._steer(journey, machine, "pause" if is_paused else "resume"))

    async def _steer(self, journey: Journey, machine: Machine, action: str) -> None:
        try:
            await machine.link.steer(journey.peer_id, action)
        except StokerError as error:  # it has ended, or the machine is lost, which its stream tells
            log.debug("%s could not %s %s: %s", machine.link.name, action, journey.peer_id, error)

    async def _ask(self, question: TextQuestion) -> None:
        """Answer a question about text by any machine that has the model."""
        error: StokerError = NoMachineError("no machine of the site answers", retry_after_s=1.0)
        machines = [one for one in self._site if one.is_up and one.info(question.model)]
        machines.sort(key=lambda one: one.life(question.model) != "ready")
        for machine in machines:
            try:
                value = await machine.link.ask(question)
            except StokerError as failure:
                error = failure
                if failure.code not in _MOVES:
                    break
            else:
                self._publish(Reply(call_id=question.call_id, value=value))
                return
        self._publish(Reply(call_id=question.call_id, error=error.info()))
