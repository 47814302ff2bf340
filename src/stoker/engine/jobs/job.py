"""One request inside the engine, from its arrival to its one terminal event.

A job is pending (it waits for its model, or is tokenised) or placed (its sequences are in a runner's queue).
The tokens' order belongs to the sequences, the text to the generations; a job joins them under the caller's
id and builds the request's events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from stoker.ipc.commands import Submit
from stoker.ipc.events import Admitted, Delta, Finished, PrefillProgress, PromptEcho, Queued
from stoker.ipc.request import FinishReason, GenerateRequest, Priority
from stoker.ipc.usage import CacheSource, Timings, TokenLogprob, Usage
from stoker.kv.sequence import Sequence
from stoker.sampling.generation import Generation

if TYPE_CHECKING:
    from stoker.engine.jobs.candidates import ScoringPass, ToScore
    from stoker.engine.jobs.preparations import Preparation
    from stoker.engine.runners.runner import ModelRunner
    from stoker.scheduler.queue import Throttle


NEWS_S, NEWS_SHARE = 1.0, 0.5
"""An estimate that is off by less than this, or than this part of it, is not published again."""


class JobQueue(Protocol):
    """Where the sequences of placed jobs wait and run: a scheduler's slots, or a queue of one-shot work."""

    paused: list[Sequence]
    throttle: Throttle

    @property
    def queue(self) -> Iterable[Sequence]:
        """The queued sequences, next first."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        ...

    @property
    def has_people(self) -> bool:
        """Whether an interactive request waits for an answer."""
        ...

    def is_owed(self, now: float) -> bool:
        """Whether background has waited longer than its patience (SPEC Q7)."""
        ...

    def enqueue(self, sequence: Sequence, now: float) -> int:
        """Put a new sequence in the queue; returns its position."""
        ...

    def retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence wherever it is."""
        ...

    def pause(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its slot or the queue until `resume` (SPEC Q17)."""
        ...

    def resume(self, sequence: Sequence, now: float) -> int:
        """Put a paused sequence back where its arrival places it; returns the position."""
        ...

    def eta_s(self, position: int) -> float | None:
        """Seconds until the sequence at that position runs; None: nothing was measured yet (SPEC Q14)."""
        ...

    def etas_s(self) -> Iterable[float | None]:
        """The same for each queued sequence, next first."""
        ...


@dataclass(slots=True, eq=False)
class JobChoice:
    """One completion: where it stands and how its text is made."""

    sequence: Sequence
    generation: Generation


@dataclass(slots=True, eq=False)
class Job:
    """A request between arrival and terminal event.

    Attributes:
        submit: what was asked for, with what was delivered before it came here.
        request_id, request: the caller's name for it, and what was asked for.
        arrival_s, admitted_s, first_token_s: on the engine's clock.
        choices: the choices that still run, by index; a pending job has none yet.
        queue, runner: where it is placed; None: it is pending.
        preparation: what tokenises it; None: it waits for its model, or is placed.
        is_paused: it stands still until it is resumed.
        position, runs_at_s: place in the queue, and when it may run, as last published; None: not known.
        progress_s: when the progress of its prompt was published last.
        num_preemptions: times that choices which have ended gave their places up.
        num_drafted, num_accepted: tokens guessed for these choices, and those of them that were drawn.
        num_dropped: tokens that shifts of the context dropped, over all choices.
        num_generated: tokens of all choices, those delivered before a restart included.
        past: tokens of the choices that have ended, by index.
        mirostat_mu: each choice's sampler state after its last token.
        to_score: the candidates of a request to choose; passes: how far they are scored.
        num_context: tokens of context that a choice of it may come to hold; 0: not known yet.
    """

    submit: Submit
    arrival_s: float
    prompt: Tokens[int] = ()
    prompt_text: str = ""
    choices: dict[int, JobChoice] = field(default_factory=dict)
    queue: JobQueue | None = None
    runner: ModelRunner | None = None
    preparation: Preparation | None = None
    is_paused: bool = False
    num_generated: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    position: int = 0
    runs_at_s: float | None = None
    progress_s: float = -math.inf
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cache_source: CacheSource | None = None
    num_dropped: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    past: dict[int, list[int]] = field(default_factory=dict)
    mirostat_mu: dict[int, float | None] = field(default_factory=dict)
    to_score: ToScore | None = None
    passes: list[ScoringPass] = field(default_factory=list)
    num_context: int = 0
    request_id: str = field(init=False)
    request: GenerateRequest = field(init=False)

    def __post_init__(self) -> None:
        self.request_id, self.request = self.submit.request_id, self.submit.request
        self.is_paused = self.submit.is_paused
        self.num_generated = sum(map(len, self.submit.generated))
        self.num_context = self.num_context or self.submit.num_context

    def __repr__(self) -> str:
        return f"<Job {self.request_id} {[choice.sequence for choice in self.choices.values()]}>"

    # ------------------------------------------------------------ its place

    def placed_at(self, position: int, eta_s: float | None, now: float) -> Queued:
        """Its place in the queue, as it is published."""
        self.position, self.runs_at_s = position, None if eta_s is None else now + eta_s
        return Queued(self.request_id, position, eta_s)

    def is_news(self, position: int, eta_s: float | None, now: float) -> bool:
        """Whether its place is another than was published, or its estimate quite another."""
        if position != self.position:
            return True
        if eta_s is None or self.runs_at_s is None:
            return eta_s is not None
        return abs(now + eta_s - self.runs_at_s) > max(NEWS_S, NEWS_SHARE * eta_s)

    # ------------------------------------------------------------ questions

    @property
    def model(self) -> str:
        """The id of its model."""
        return self.submit.request.model

    @property
    def deadline_s(self) -> float | None:
        """When it has to have ended, on the engine's clock."""
        timeout_s = self.submit.request.timeout_s
        return None if timeout_s is None else self.arrival_s + timeout_s

    @property
    def is_interactive(self) -> bool:
        """Whether a caller waits for its answer."""
        return self.submit.request.priority is Priority.INTERACTIVE

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its model to be in memory."""
        return self.queue is None and self.preparation is None and not self.is_paused

    @property
    def has_begun(self) -> bool:
        """Whether it was placed before: it is not refused any more."""
        return bool(self.submit.generated)

    @property
    def leader(self) -> Sequence | None:
        """The sequence that computes the prompt for all choices."""
        return next((choice.sequence for choice in self.choices.values()), None)

    @property
    def is_running(self) -> bool:
        """Whether any choice holds a slot."""
        return any(choice.sequence.is_running for choice in self.choices.values())

    @property
    def open_choices(self) -> list[int]:
        """Indices of the choices that have not ended."""
        if self.queue is not None:
            return list(self.choices)
        finished = self.submit.is_finished or [False] * self.request.n
        return [index for index in range(self.request.n) if not finished[index]]

    @property
    def num_to_read(self) -> int:
        """Tokens of its prompt, and of the candidates of a request to choose."""
        return len(self.prompt) + (self.to_score.num_tokens if self.to_score is not None else 0)

    def resubmit(self, now: float) -> Submit:
        """The command that lets it go on elsewhere from the tokens it has."""
        indices = range(self.request.n)
        return Submit(
            request_id=self.request_id,
            request=self.request,
            generated=[self._tokens(index) for index in indices],
            is_finished=[index not in self.choices for index in indices],
            mirostat_mu=[self.mirostat_mu.get(index) for index in indices],
            age_s=now - self.arrival_s,
            is_paused=self.is_paused,
            num_context=self.num_context,
            made_for=self.submit.made_for,
            vocabulary=self.submit.vocabulary,
        )

    def _tokens(self, index: int) -> list[int]:
        choice = self.choices.get(index)
        return list(self.past.get(index, []) if choice is None else choice.generation.tokens)

    # ------------------------------------------------------------ events

    def admitted(self, sequence: Sequence, now: float) -> Admitted:
        """The event for a choice that got a slot; the first time counts as the end of the waiting."""
        if self.admitted_s is None:
            self.admitted_s = now
            self.num_cached = sequence.num_cached or 0
            self.cache_source = sequence.cache_source if self.num_cached else None
        return Admitted(
            self.request_id,
            self.num_cached,
            self.cache_source,
            len(self.prompt),
            self.num_context,
            index=sequence.key.index,
            slot=None if sequence.slot is None else sequence.place,
            reason=sequence.why,
        )

    def note(self, delta: Delta) -> None:
        """Count a drawn token; one with a finish reason ends its choice."""
        self.num_generated += 1
        self.mirostat_mu[delta.index] = delta.mirostat_mu
        if delta.finish_reason is not None:
            self._close_choice(delta.index).close()

    def ended(self, index: int, reason: FinishReason) -> Delta:
        """The event for a choice that ends without a further token; held text comes with it."""
        text = ""
        if index in self.choices:
            generation = self._close_choice(index)
            text = generation.flush()
            generation.close()
        return Delta(request_id=self.request_id, index=index, text=text, finish_reason=reason)

    def _close_choice(self, index: int) -> Generation:
        choice = self.choices.pop(index)
        self.num_preemptions += choice.sequence.num_preemptions
        self.num_drafted += choice.sequence.num_drafted
        self.num_accepted += choice.sequence.num_accepted
        self.past[index] = choice.generation.tokens
        return choice.generation

    def close(self) -> None:
        """Free what the choices that still run hold, and give up what tokenises it."""
        if self.preparation is not None:
            self.preparation.give_up()
        for choice in self.choices.values():
            choice.generation.close()

    def echo(self) -> PromptEcho:
        """The prompt's own event."""
        wanted = self.request.prompt_logprobs is not None
        return PromptEcho(
            request_id=self.request_id,
            text=self.prompt_text,
            logprobs=self.prompt_logprobs if wanted else None,
        )

    def progress(self, sequence: Sequence, now: float) -> PrefillProgress:
        """How far the prompt is computed; the first step reads a source as a whole."""
        source = sequence.conditioning.source
        total, num_computed = len(source) or sequence.num_prompt, sequence.num_computed
        return PrefillProgress(
            request_id=self.request_id,
            total=total,
            cached=self.num_cached,
            processed=(total if source and num_computed else min(num_computed, sequence.num_prompt)),
            time_ms=(now - (self.admitted_s or now)) * 1000,
        )

    def finished(self, now: float) -> Finished:
        """The terminal event."""
        admitted_s = now if self.admitted_s is None else self.admitted_s
        first_s = now if self.first_token_s is None else self.first_token_s
        return Finished(
            request_id=self.request_id,
            usage=Usage(
                prompt_tokens=self.num_to_read,
                completion_tokens=self.num_generated,
                cached_tokens=self.num_cached,
                cache_source=self.cache_source,
                dropped_tokens=self.num_dropped,
                draft_tokens=self.num_drafted,
                accepted_tokens=self.num_accepted,
            ),
            timings=Timings(
                queue_s=admitted_s - self.arrival_s,
                prefill_s=first_s - admitted_s,
                decode_s=now - first_s,
                num_preemptions=self.num_preemptions,
            ),
        )
