"""One live request inside the engine: its choices, what they have delivered, when.

Owned by the resident that runs it. The tokens' order belongs to the scheduler's sequences, the text to
decode's generations; this joins them under the caller's id and builds the request's events.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from stoker.engine.jobs.candidates import ToScore
from stoker.ipc.commands import Submit
from stoker.ipc.events import Admitted, Delta, Finished, PrefillProgress, PromptEcho
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import CacheSource, Timings, TokenLogprob, Usage
from stoker.kv.sequence import Sequence, SequenceState
from stoker.sampling.generation import Drawn, Generation


@dataclass(slots=True, eq=False)
class JobChoice:
    """One completion: where it stands and how its text is made."""

    sequence: Sequence
    generation: Generation


@dataclass(slots=True, eq=False)
class Job:
    """A request between arrival and its one terminal event.

    Attributes:
        choices: the choices that still run, by index.
        num_preemptions: times that choices which have ended gave their places up.
        position: place in the line as last told.
        num_dropped: tokens that shifts of the context dropped, over all choices.
        num_generated: tokens of all choices, those delivered before a restart included.
        past: tokens of the choices that have ended, by index.
        mirostat_mu: each choice's sampler state after its last token.
        to_score: the candidates, of a request to choose.
        num_context: tokens of context that a choice of it may come to hold.
        arrival_s, admitted_s, first_token_s: on the engine's clock.
    """

    request_id: str
    request: GenerateRequest
    prompt: Tokens[int]
    prompt_text: str
    choices: dict[int, JobChoice]
    arrival_s: float
    num_generated: int = 0
    num_preemptions: int = 0
    position: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cache_source: CacheSource | None = None
    num_dropped: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    past: dict[int, list[int]] = field(default_factory=dict)
    mirostat_mu: dict[int, float | None] = field(default_factory=dict)
    to_score: ToScore | None = None
    num_context: int = 0

    def __repr__(self) -> str:
        return f"<Job {self.request_id} {[choice.sequence for choice in self.choices.values()]}>"

    @property
    def leader(self) -> Sequence | None:
        """The sequence that computes the prompt for all choices."""
        return next((choice.sequence for choice in self.choices.values()), None)

    @property
    def is_running(self) -> bool:
        """Whether any choice holds a slot."""
        return any(choice.sequence.is_running for choice in self.choices.values())

    def submit(self, now: float) -> Submit:
        """The command that lets it go on elsewhere from the tokens it has."""
        indices = range(self.request.n)
        return Submit(
            request_id=self.request_id,
            request=self.request,
            generated=[self._tokens(index) for index in indices],
            is_finished=[index not in self.choices for index in indices],
            mirostat_mu=[self.mirostat_mu.get(index) for index in indices],
            age_s=now - self.arrival_s,
            is_paused=any(c.sequence.state is SequenceState.PAUSED for c in self.choices.values()),
            num_context=self.num_context,
        )

    def _tokens(self, index: int) -> list[int]:
        choice = self.choices.get(index)
        return list(self.past.get(index, []) if choice is None else choice.generation.tokens)

    def admitted(self, sequence: Sequence, now: float) -> Admitted:
        """The event for a choice that got a slot; the first time counts as the end of the waiting."""
        if self.admitted_s is None:
            self.admitted_s = now
            self.num_cached = sequence.num_cached or 0
            self.cache_source = sequence.cache_source if self.num_cached else None
        return Admitted(
            self.request_id, self.num_cached, self.cache_source, len(self.prompt), self.num_context
        )

    def delta(self, index: int, drawn: Drawn) -> Delta:
        """The event for one drawn token; ends the choice when it carries a finish reason."""
        self.num_generated += 1
        self.mirostat_mu[index] = drawn.mirostat_mu
        if drawn.finish_reason is not None:
            self._close_choice(index).close()
        return Delta(
            request_id=self.request_id,
            index=index,
            text=drawn.text,
            token_ids=[drawn.token_id],
            logprobs=None if drawn.logprob is None else [drawn.logprob],
            finish_reason=drawn.finish_reason,
            stop_text=drawn.stop_text,
            mirostat_mu=drawn.mirostat_mu,
        )

    def ended(self, index: int, reason: FinishReason) -> Delta:
        """The event for a choice that ends without a further token; held text comes with it."""
        generation = self._close_choice(index)
        text = generation.flush()
        generation.close()
        return Delta(request_id=self.request_id, index=index, text=text, finish_reason=reason)

    def _close_choice(self, index: int) -> Generation:
        choice = self.choices.pop(index)
        self.num_preemptions += choice.sequence.num_preemptions
        self.past[index] = choice.generation.tokens
        return choice.generation

    def close(self) -> None:
        """Free what the choices that still run hold; they are ended by an error."""
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
                prompt_tokens=len(self.prompt),
                completion_tokens=self.num_generated,
                cached_tokens=self.num_cached,
                cache_source=self.cache_source,
                dropped_tokens=self.num_dropped,
            ),
            timings=Timings(
                queue_s=admitted_s - self.arrival_s,
                prefill_s=first_s - admitted_s,
                decode_s=now - first_s,
                num_preemptions=self.num_preemptions,
            ),
        )
