"""An encoder in memory and the texts that wait for it (SPEC K2, K4, Q13).

Has the surface of `runner.SlotRunner`, so that the loop treats both alike. Requests are those of
`state_output` "embed", or "score" where it is a reranker: each gets one `StateReady` with its vector or its
scores, then its terminal event. A call carries as many whole texts as the step target allows, so that people
who wait for another model wait no longer than one step of any other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.engine.jobs.prepare import PrepContext
from stoker.engine.runners.description import model_info
from stoker.engine.runners.queue import TextQueue, shared_text
from stoker.engine.runners.turns import Contender
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestTimeoutError,
    StepFailedError,
    StokerError,
    UnsupportedError,
)
from stoker.ipc.events import Event, Failed, Paused, Queued, Resumed, StateReady
from stoker.ipc.model import Policy
from stoker.ipc.request import FinishReason, StateOutput
from stoker.ipc.status import SlotStatus, WaitStatus
from stoker.ipc.usage import Tensor
from stoker.kv.sequence import SequenceState
from stoker.sampling.workspace import Workspace
from stoker.scheduler.cost import StepCost

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

    from stoker.backends.protocol.backend import Rows
    from stoker.backends.protocol.encoding import Encoder
    from stoker.engine.jobs.job import Job
    from stoker.engine.residency.loading import Load
    from stoker.engine.threads.pace import Pace
    from stoker.ipc.commands import Submit
    from stoker.ipc.model import ModelInfo, ModelSpec
    from stoker.ipc.request import Priority
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.throttle import Throttle

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
"""How often waiting requests hear of their place in the line at most."""
LEAST_RETRY_S = 1.0
_TARGETS = {Policy.LATENCY: 1.0, Policy.BALANCED: 3.0, Policy.THROUGHPUT: float("inf")}
_NO_BOUND = 2**31  # preparation leaves room for an answer, which a text to embed has none of
_FLOATS = np.dtype("<f4")


class OneShotRunner:
    """An encoder in memory.

    Attributes:
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        allowance_s: what a call may take beside people who read another model's text; None: its own target.
        events: what has happened, for the loop to publish.
    """

    def __init__(self, spec: ModelSpec, encoder: Encoder, pace: Pace) -> None:
        self.spec = spec
        self.backend = encoder
        self.load: Load | None = None
        self.degraded: tuple[str, ...] = ()
        self.allowance_s: float | None = None
        self.events: list[Event] = []
        self.line = TextQueue(spec.max_queue, spec.background_patience_s)
        self._pace = pace
        self._told_s = 0.0
        self._live: dict[str, Job] = {}
        self._cost = StepCost()
        self._runner = pace.join(encoder, self._cost)
        limits = encoder.capabilities
        self.prep = PrepContext(
            encoder.vocabulary,
            limits.n_vocab,
            _NO_BOUND,
            Workspace(limits.n_vocab),
            model=spec.id,
            fingerprint=limits.fingerprint,
            scores_pairs=self._is_reranker,
            max_text_tokens=limits.n_ctx,
        )

    def __repr__(self) -> str:
        return f"<OneShotRunner {self.spec.id} {self.line!r} {len(self._live)} live>"

    @property
    def _is_reranker(self) -> bool:
        return self.backend.pooling == "rank"

    # ------------------------------------------------------------ questions

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return self.line.has_work

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits; those that are paused are not counted."""
        return self.line.has_requests

    @property
    def num_leases(self) -> int:
        """Requests that need it to be in memory: those that are paused do not."""
        return len(self._live) - len(self.line.paused)

    @property
    def n_ctx(self) -> int:
        """Tokens that one text may have."""
        return self.backend.capabilities.n_ctx

    def contexts(self) -> list[int]:
        """Tokens of context that each of its texts needs, those that are paused too."""
        return [len(live.prompt) for live in self._live.values()]

    @property
    def num_cells(self) -> tuple[int, int]:
        """It has none."""
        return 0, 0

    @property
    def has_people(self) -> bool:
        """Whether somebody waits for an answer of it."""
        return self.line.has_people

    @property
    def has_unstored(self) -> bool:
        """It keeps nothing that could be stored."""
        return False

    def info(self) -> ModelInfo:
        """What was loaded and the limits that resulted."""
        encoder = self.backend
        num_texts = encoder.capabilities.num_sequences
        info = model_info(self.spec, encoder, num_texts, self.degraded)
        return msgspec.structs.replace(info, pooling=encoder.pooling, n_embd=encoder.n_embd)

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        return self.line.stats()

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its line is at its bound; `num_arriving` are on their way."""
        wait_s = self._wait_s(self.line.num_tokens_before(len(self.line.waiting())))
        self.line.check_queue(priority, num_arriving, max(LEAST_RETRY_S, wait_s or 0.0))

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        return Contender(self.spec.id, is_encoder=True)

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited over its patience."""
        return self.line.is_owed(now)

    def next_deadline_s(self) -> float | None:
        """When the first of its requests passes its deadline."""
        return self.line.next_deadline_s()

    def memory(self) -> dict[str, int]:
        """Bytes it takes, by line."""
        return self.backend.memory()

    def slot_status(self, now: float) -> list[SlotStatus]:  # noqa: ARG002 - the surface of a resident
        """It has no slots: nothing of a text outlives a call."""
        return []

    def queue_status(self, state: SequenceState, now: float) -> list[WaitStatus]:
        """The texts in the line that are in `state`, next first."""
        line, tokens, found = self.line.waiting(), 0, []
        for position, sequence in enumerate(line):
            if sequence.state is state:
                found.append(_waiting(sequence, self.spec.id, now, (position, self._wait_s(tokens))))
            tokens += len(sequence.tokens)
        return found

    def paused_status(self, now: float) -> list[WaitStatus]:
        """The texts that are paused."""
        return [_waiting(sequence, self.spec.id, now, (None, None)) for sequence in self.line.paused]

    # ------------------------------------------------------------ commands

    def accept(self, live: Job, now: float) -> None:
        """Put a prepared request in the line.

        Raises:
            UnsupportedError: it asks for text, or the model gives no vectors.
            ContextLengthError: its text is too long.
        """
        if not live.choices:  # replayed: it had ended but for its terminal event
            self._live[live.request_id] = live
            self._finish(live, now)
            return
        try:
            self._check(live)
        except StokerError:
            live.close()
            raise
        self._live[live.request_id] = live
        (choice,) = live.choices.values()
        live.position = self.line.enqueue(choice.sequence, now)
        self.events.append(Queued(live.request_id, live.position, self._eta_s(live.position)))

    def _check(self, live: Job) -> None:
        name, n_ctx = self.spec.id, self.backend.capabilities.n_ctx
        wanted = live.request.state_output
        if wanted not in {StateOutput.EMBED, StateOutput.SCORE}:
            raise UnsupportedError(f"{name} is an encoder: it embeds texts and generates none", param="model")
        if self._is_reranker and wanted is StateOutput.EMBED:
            raise UnsupportedError(
                f"{name} is a reranker: it scores texts, it gives no vectors", param="model"
            )
        if live.request.n > 1:
            raise InvalidRequestError(f"a text has one vector, {live.request.n} were asked for", param="n")
        if len(live.prompt) > n_ctx:
            param = "documents" if wanted is StateOutput.SCORE else "input"
            raise ContextLengthError.over("the text", len(live.prompt), n_ctx, param=param)

    def cancel(self, request_id: str, now: float) -> None:
        """End a request with `cancelled`; an unknown id is ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, FinishReason.CANCELLED, now)

    def cancel_all(self, now: float) -> None:
        """End every request with `cancelled`."""
        for request_id in list(self._live):
            self.cancel(request_id, now)

    def pause(self, request_id: str, now: float) -> None:
        """Let a request stand still; an unknown id is ignored (SPEC Q17)."""
        live = self._live.get(request_id)
        if live is None:
            return
        sequence = _sequence(live)
        if sequence.state is SequenceState.QUEUED:
            self.line.pause(sequence, now)
        self.events.append(Paused(request_id))

    def resume(self, request_id: str, now: float) -> None:
        """Let a paused request go on; an unknown id is ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        sequence = _sequence(live)
        if sequence.state is SequenceState.PAUSED:
            self.line.resume(sequence, now)
        self.events.append(Resumed(request_id))

    def evacuate(self, reason: str, now: float) -> list[Submit]:  # noqa: ARG002 - no text is ever parked
        """It has to go: every request leaves it, the next of the line first, to be computed later."""
        order = [*self.line.chosen, *self.line.waiting(), *self.line.paused]
        return [self._send_off(self._live[sequence.key.request_id], now) for sequence in order]

    def evacuate_waiting(self, reason: str, now: float) -> list[Submit]:
        """The same: between turns nothing of it runs."""
        return self.evacuate(reason, now)

    def _send_off(self, live: Job, now: float) -> Submit:
        submit = live.submit(now)
        self.line.retire(_sequence(live), FinishReason.PREEMPTED, now)
        live.close()
        del self._live[live.request_id]
        return submit

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some of its requests run from the next turn on (SPEC M4, M6)."""
        self.line.throttle = throttle

    def drop_idle(self, now: float) -> None:
        """It keeps nothing."""

    def rest(self, now: float) -> None:
        """It has nothing to store."""

    def close(self) -> None:
        """Free the native model."""
        self._pace.leave(self._runner)
        self.backend.close()

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> None:
        """End who is past its deadline, and choose the texts of the next call."""
        self.expire(now)
        limits, target_s = self.backend.capabilities, self.spec.target_step_ms / 1000
        target_s *= _TARGETS[self.spec.policy]
        if self.allowance_s is not None:
            target_s = min(target_s, self.allowance_s)
        max_tokens = limits.n_batch
        if target_s != float("inf"):
            max_tokens = self._cost.tokens_within(target_s, limits.n_batch)
        for sequence in self.line.choose(max_tokens, limits.num_sequences, now):
            self.events.append(self._live[sequence.key.request_id].admitted(sequence, now))
        self._tell_positions(now)

    def expire(self, now: float) -> None:
        """End who is past its deadline."""
        for sequence in self.line.expire(now):
            live = self._live[sequence.key.request_id]
            waited = f"{now - live.arrival_s:.1f} s of its timeout_s {live.request.timeout_s}"
            self._fail(live, RequestTimeoutError(f"the request took {waited}", param="timeout_s"), now)

    def step(self, now: float) -> None:
        """Compute the texts that were chosen."""
        if self.line.chosen:
            self._run(list(self.line.chosen), now)

    def _tell_positions(self, now: float) -> None:
        """Those whose place in the line has changed hear of it, now and then (SPEC Q14)."""
        if now - self._told_s < TELL_EVERY_S:
            return
        self._told_s, tokens = now, 0
        for position, sequence in enumerate(self.line.waiting()):
            live = self._live[sequence.key.request_id]
            if live.position != position:
                live.position = position
                self.events.append(Queued(live.request_id, position, self._wait_s(tokens)))
            tokens += len(sequence.tokens)

    def _run(self, texts: Several[Sequence], now: float) -> None:
        """One call; a failing one is halved until it fails its culprit alone (SPEC Q12)."""
        different = list(dict.fromkeys(map(shared_text, texts)))
        num_tokens = sum(len(tokens) for _, tokens in different)
        self._pace.begin(num_tokens)
        try:
            found = self.backend.encode([tokens for _, tokens in different])
        except StepFailedError as error:
            self._pace.abandon()
            if len(texts) == 1:
                live = self._live[texts[0].key.request_id]
                log.warning("encoding failed for %r: %s", live, error)
                self._fail(live, error, now)
                return
            middle = len(texts) // 2
            self._run(texts[:middle], now)
            self._run(texts[middle:], now)
        else:
            self._pace.end(self._runner, num_tokens)
            vectors = dict(zip(different, found, strict=True))
            for sequence in texts:
                self._deliver(sequence, vectors[shared_text(sequence)], self._pace.now())

    def _deliver(self, sequence: Sequence, vector: Rows, now: float) -> None:
        live = self._live[sequence.key.request_id]
        if not np.isfinite(vector).all():
            self._fail(live, StepFailedError("the model's vector holds what is no finite number"), now)
            return
        name = "scores" if self._is_reranker else "embedding"
        tensor = Tensor(name, vector.shape, vector.astype(_FLOATS).tobytes())
        ready = StateReady(request_id=live.request_id, num_tokens=len(sequence.tokens), tensors=[tensor])
        self.events.append(ready)
        self._end(live, FinishReason.LENGTH, now)

    # ------------------------------------------------------------ forecasts

    def _eta_s(self, position: int) -> float | None:
        return self._wait_s(self.line.num_tokens_before(position))

    def _wait_s(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens take, in full calls; None: nothing was measured yet."""
        call_s = self._cost.predict(self.backend.capabilities.n_batch)
        return None if call_s is None else call_s * num_tokens / self.backend.capabilities.n_batch

    # ------------------------------------------------------------ endings

    def _end(self, live: Job, reason: FinishReason, now: float) -> None:
        self.line.retire(_sequence(live), reason, now)
        self.events.append(live.ended(0, reason))
        self._finish(live, now)

    def _finish(self, live: Job, now: float) -> None:
        del self._live[live.request_id]
        self.events.append(live.finished(now))

    def _fail(self, live: Job, error: StokerError, now: float) -> None:
        del self._live[live.request_id]
        self.line.retire(_sequence(live), FinishReason.ERROR, now)
        live.close()
        self.events.append(Failed(live.request_id, error.info()))


def _sequence(live: Job) -> Sequence:
    (choice,) = live.choices.values()
    return choice.sequence


def _waiting(
    sequence: Sequence, model: str, now: float, place: tuple[int | None, float | None]
) -> WaitStatus:
    position, eta_s = place
    return WaitStatus(
        request_id=sequence.key.request_id,
        model=model,
        priority=sequence.priority,
        position=position,
        eta_s=eta_s,
        num_tokens=len(sequence.tokens),
        story=[(round(now - at, 3), what) for at, what in sequence.story],
    )
