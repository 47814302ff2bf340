"""What a step's rows of logits mean for the requests they were computed for.

A row becomes a token, prompt log probabilities, progress or a state. `draw` yields the token ids that the
next step needs; where a device computes meanwhile, `deliver` makes text, stops, log probabilities and events
of them after that step was launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from msgspec import structs

from stoker.backends.protocol.backend import Candidates
from stoker.errors import StepFailedError, StokerError, UnsupportedError
from stoker.ipc.events import StateReady
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import TokenLogprob
from stoker.kv.sequence import SequenceState
from stoker.sampling.logprobs import token_logprob
from stoker.sampling.together import PlainSamplers, draw_rows, draw_together, plain_samplers
from stoker.speculation.speculator import pause_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as SequenceOf

    from stoker.backends.protocol.backend import Backend, InFlight, Rows
    from stoker.engine.jobs.job import Job
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.threads.timer import StepTimer
    from stoker.ipc.events import Delta
    from stoker.kv.sequence import Sequence
    from stoker.sampling.generation import Generation
    from stoker.sampling.sampler import Sampler
    from stoker.sampling.truncation import Workspace
    from stoker.scheduler.plan import Planned, StepPlan
    from stoker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Writers:
    """The sequences of a step of decode rows all of which are drawn for together, from candidates."""

    parts: tuple[tuple[Job, Sequence, Generation], ...]
    samplers: list[Sampler]
    plain: PlainSamplers | None
    workspace: Workspace

    def draw(self, found: Candidates) -> SequenceOf[int | StokerError]:
        """The next token of each."""
        drawn = None if self.plain is None else self.plain.draw(found, self.workspace)
        return draw_together(self.samplers, found, self.workspace) if drawn is None else drawn

    def are_of(self, plan: StepPlan) -> bool:
        """Whether a step has these rows, in this order."""
        if len(plan.parts) != len(self.parts):
            return False
        for part, (_, sequence, _) in zip(plan.parts, self.parts, strict=True):
            if part.sequence is not sequence:
                return False
        return True


_Own: TypeAlias = "Rows | Candidates | int | StokerError"
_Found = TypeVar("_Found", Candidates, "Rows")

PROGRESS_EVERY_S = 0.5
"""How often the progress of a prompt is published whose own client did not ask for it."""


class Postprocess:
    """Digests the rows of one model's steps; holds the tokens that were drawn and not delivered.

    A token is delivered at once where it is certainly a sequence's last, where it is drawn among guesses, and
    where the model cannot take back a token that was computed in vain.

    Args:
        end_in_flight: called before a sequence is ended that may be in a step that was launched since.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        jobs: JobTable,
        timer: StepTimer,
        end_in_flight: Callable[[Sequence], None],
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._jobs = jobs
        self._timer = timer
        self._end_in_flight = end_in_flight
        self._n_ctx = backend.capabilities.n_ctx
        self._defers = backend.capabilities.is_async and backend.capabilities.can_trim
        self._undelivered: list[tuple[Job, Sequence]] = []
        self._writers: _Writers | None = None  # of the last step that had some
        self._took_s = 0.0  # what the step took that is digested

    def __repr__(self) -> str:
        return f"<Postprocess of {self._backend!r}>"

    def draw(self, plan: StepPlan, in_flight: InFlight, took_s: float) -> None:
        """Take what the step computed, in so many seconds, to the requests it was computed for."""
        self._took_s = took_s
        candidates, rows, now = in_flight.candidates(), in_flight.rows(), self._timer.now()
        self._writers = None  # some may end here
        drawn: dict[int, int | StokerError] = {}
        if len(candidates):
            drawn = self._draw_from(plan, candidates, draw_together, takes_candidates=True)
        if len(rows):
            drawn |= self._draw_from(plan, rows, draw_rows, takes_candidates=False)
        found = _shared_out(plan, rows, candidates, drawn)
        if not plan.is_rows and any(part.sequence.is_to_embed for part in plan.parts):
            # They come last: their last state may take a step, and the rows end there.
            found.sort(key=lambda each: each[0].sequence.is_to_embed)
        for part, own in found:
            job = self._jobs.get(part.sequence.key.request_id)
            if job is not None and part.sequence.is_running:
                try:
                    self._digest(job, part, own, now)
                except StokerError as error:
                    if isinstance(error, StepFailedError):  # its cells may be no numbers either
                        part.sequence.shares = False
                    self._jobs.fail(job, error, now)

    def foresees(self, plan: StepPlan) -> bool:
        """Whether the next tokens of a step of decode rows may be drawn by `certain_tokens`."""
        if self._writers is None or not self._writers.are_of(plan):
            self._writers = self._writers_of(plan)
        return self._writers is not None and not self._undelivered

    def certain_tokens(self, in_flight: InFlight) -> list[int] | None:
        """The next token of each row of the step last foreseen, if none of them ends its sequence.

        Changes nothing: `take` does, or `draw`, which draws the same and looks at every row by itself.
        """
        writers = self._writers
        assert writers is not None, "nothing was foreseen"
        tokens: list[int] = []
        drawn = writers.draw(in_flight.candidates())
        for (_, sequence, generation), token in zip(writers.parts, drawn, strict=True):
            is_full = len(sequence.tokens) + 1 >= self._n_ctx
            if isinstance(token, StokerError) or is_full or generation.is_last(token):
                return None
            tokens.append(token)
        return tokens

    def _writers_of(self, plan: StepPlan) -> _Writers | None:
        """Those of the step, where each row's token can be drawn from its candidates, and delivered later."""
        seqs, _, generations = self._to_draw(plan, takes_candidates=True)
        if not (self._defers and len(seqs) == len(plan.parts)):
            return None
        sequences = [part.sequence for part in plan.parts]
        jobs = [self._jobs[sequence.key.request_id] for sequence in sequences]
        parts = tuple(zip(jobs, sequences, generations, strict=True))
        samplers = [each.sampler for each in generations]
        return _Writers(parts, samplers, plain_samplers(samplers), generations[0].workspace)

    def take(self, tokens: SequenceOf[int]) -> None:
        """The tokens that `certain_tokens` has found are their sequences' next; `deliver` follows."""
        assert self._writers is not None, "nothing was drawn"
        for (job, sequence, generation), token in zip(self._writers.parts, tokens, strict=True):
            generation.take(token)
            sequence.tokens.append(token)
            self._undelivered.append((job, sequence))

    def _draw_from(
        self,
        plan: StepPlan,
        found: _Found,
        draw: Callable[[list[Sampler], _Found, Workspace], Iterable[int | StokerError | None]],
        *,
        takes_candidates: bool,
    ) -> dict[int, int | StokerError]:
        """The next token of each sequence that has what is needed for one there, or what is wrong with it."""
        seqs, places, generations = self._to_draw(plan, takes_candidates=takes_candidates)
        if not seqs:
            return {}
        own = found if len(places) == len(found) else found[np.array(places)]
        tokens = draw([each.sampler for each in generations], own, generations[0].workspace)
        return _taken(seqs, generations, tokens)

    def _to_draw(
        self, plan: StepPlan, *, takes_candidates: bool
    ) -> tuple[list[int], list[int], list[Generation]]:
        """Who is drawn for together, from which row of those with or without candidates, and by what."""
        seqs, places, generations, row = [], [], [], 0
        for part in plan.parts:
            item, sequence = part.item, part.sequence
            if item.takes_candidates is not takes_candidates:
                continue
            job = self._jobs.get(sequence.key.request_id)
            if (
                item.num_logits == 1
                and job is not None
                and sequence.is_running
                and job.request.max_tokens
                and not sequence.wants_prompt_logits
            ):
                generation = job.choices[sequence.key.index].generation
                if takes_candidates or generation.num_needed is not None:
                    seqs.append(item.seq)
                    places.append(row)
                    generations.append(generation)
            row += item.num_logits
        return seqs, places, generations

    def _digest(self, job: Job, part: Planned, own: _Own, now: float) -> None:
        """What one sequence's rows, or the token drawn from them, mean for its request."""
        sequence, start = part.sequence, part.item.start
        if isinstance(own, StokerError):
            raise own
        if start < sequence.num_prompt:
            if sequence.wants_prompt_logits:
                assert isinstance(own, np.ndarray), f"{sequence!r} has no rows"
                self._note_prompt_logprobs(job, start, own)
            if sequence is job.leader and job.first_token_s is None:
                self._tell_progress(job, sequence, now)
        if len(sequence.tokens) - sequence.num_computed > sequence.is_to_embed:
            return
        index = sequence.key.index
        if job.request.max_tokens == 0:
            if job.request.state_output is not None:
                self._jobs.events.append(self._state_of(job, sequence))
            self._jobs.end_choice(job, index, FinishReason.LENGTH, now)
            return
        if isinstance(own, int):
            self._take(job, sequence, own, now)
        else:
            self._draw_tokens(job, part, own, now)

    def _tell_progress(self, job: Job, sequence: Sequence, now: float) -> None:
        """Publish how far the prompt is; whose client did not ask sees its end by what comes after it."""
        is_due = sequence.num_pending > 0 and now - job.progress_s >= PROGRESS_EVERY_S
        if job.request.return_progress or is_due:
            job.progress_s = now
            self._jobs.events.append(job.progress(sequence, now))

    def _take(self, job: Job, sequence: Sequence, token: int, now: float) -> None:
        """The next token was drawn: it is delivered now, or after the next launch."""
        generation = job.choices[sequence.key.index].generation
        sequence.tokens.append(token)
        if self._defers and len(sequence.tokens) < self._n_ctx and not generation.is_last(token):
            self._undelivered.append((job, sequence))
        else:
            self._publish(job, sequence, generation.deliver(), now)

    def _draw_tokens(self, job: Job, part: Planned, rows: Rows | Candidates, now: float) -> None:
        """The next token, and those after it that were computed ahead for as long as they are what is drawn.

        What else was computed ahead is taken back, also where the request ends or fails on the way.
        """
        sequence, generation = part.sequence, job.choices[part.sequence.key.index].generation
        num_ahead = sequence.num_ahead
        if self._defers and not num_ahead and not isinstance(rows, Candidates):
            self._take(job, sequence, generation.draw(rows[-1]), now)
            return
        sequence.num_drafted += num_ahead
        wait_s = 0.0 if sequence.is_background else pause_s(self._took_s, num_ahead)
        draft = part.item.tokens[len(part.item.tokens) - num_ahead :]
        for at, guess in enumerate((*draft, None), start=len(rows) - num_ahead - 1):
            delta = generation.advance(rows[at : at + 1] if isinstance(rows, Candidates) else rows[at])
            token = delta.token_ids[0]
            is_guessed = delta.finish_reason is None and token == guess
            if is_guessed:
                delta = structs.replace(delta, pause_s=wait_s)
                sequence.draw_ahead()
                sequence.num_accepted += 1
            else:
                self._scheduler.take_back(sequence)
            sequence.tokens.append(token)
            self._publish(job, sequence, delta, now)
            if not is_guessed:
                return

    @property
    def has_first(self) -> bool:
        """Whether a request's first token is among those that were drawn and not delivered."""
        return any(job.first_token_s is None for job, _ in self._undelivered)

    def deliver(self) -> None:
        """Make events of the tokens that were only drawn; the step after may be in flight."""
        if not self._undelivered:
            return
        undelivered, self._undelivered, now = self._undelivered, [], self._timer.now()
        for job, sequence in undelivered:
            if job.request_id not in self._jobs:
                continue  # another choice has failed, and the request with it
            try:
                delta = job.choices[sequence.key.index].generation.deliver()
                self._publish(job, sequence, delta, now)
            except StokerError as error:
                self._end_in_flight(sequence)
                self._jobs.fail(job, error, now)

    def _publish(self, job: Job, sequence: Sequence, delta: Delta, now: float) -> None:
        """The event of a token; end the choice if it is its last, or if no further one would fit."""
        if job.first_token_s is None:
            job.first_token_s = now
        job.note(delta)
        self._scheduler.tally.num_drawn += 1
        self._jobs.events.append(delta)
        if delta.finish_reason is not None:
            self._end_in_flight(sequence)
            if sequence.state is not SequenceState.DONE:  # DONE: the turn that drew it has ended it
                self._scheduler.retire(sequence, delta.finish_reason, now)
            self._jobs.finish_if_done(job, now)
        elif len(sequence.tokens) >= self._n_ctx:
            if job.request.context_shift:
                job.num_dropped += self._scheduler.shift(sequence, self._n_ctx, now)
            else:
                self._jobs.end_choice(job, delta.index, FinishReason.LENGTH, now)

    def _state_of(self, job: Job, sequence: Sequence) -> StateReady:
        """What the model has made of the prompt (SPEC K5, D8)."""
        assert sequence.slot is not None, f"{sequence!r} does not run"
        extensions, description = self._backend.extensions, self._backend.capabilities.description
        if sequence.is_to_embed:
            if extensions.hidden is None:
                raise UnsupportedError(f"{description} gives no state of a text", param="kind")
            tensors = [extensions.hidden.last_hidden(sequence.slot, sequence.tokens)]
            self._scheduler.completed(sequence)
        elif extensions.recurrent is None:
            raise UnsupportedError(f"{description} has no recurrent state", param="state")
        else:
            tensors = extensions.recurrent.read_state(sequence.slot)
        return StateReady(request_id=job.request_id, num_tokens=sequence.num_computed, tensors=tensors)

    def _note_prompt_logprobs(self, job: Job, start: int, rows: Rows) -> None:
        noted, prompt, vocabulary = job.prompt_logprobs, job.prompt, self._backend.vocabulary
        num_top = job.request.prompt_logprobs or 0
        if not noted:
            noted.append(TokenLogprob(prompt[0], vocabulary.special_piece(prompt[0]), None, []))
        for at, row in enumerate(rows, start=start + 1):
            if at == len(noted) and at < len(prompt):
                noted.append(token_logprob(row, prompt[at], num_top, vocabulary))
        if start + len(rows) == len(prompt):
            self._jobs.events.append(job.echo())


def _taken(
    seqs: list[int], generations: list[Generation], tokens: Iterable[int | StokerError | None]
) -> dict[int, int | StokerError]:
    """What was drawn, by sequence; the generations take it."""
    drawn: dict[int, int | StokerError] = {}
    for seq, generation, token in zip(seqs, generations, tokens, strict=True):
        if token is None:
            continue
        if not isinstance(token, StokerError):
            generation.take(token)
        drawn[seq] = token
    return drawn


def _shared_out(
    plan: StepPlan, rows: Rows, candidates: Candidates, drawn: dict[int, int | StokerError]
) -> list[tuple[Planned, _Own]]:
    """The parts of a step, each with its token where that was drawn, else its rows or candidates."""
    found: list[tuple[Planned, _Own]] = []
    row = candidate = 0
    for part in plan.parts:
        item = part.item
        count = item.num_logits
        if item.seq in drawn:
            found.append((part, drawn[item.seq]))
            if item.takes_candidates:
                candidate += count
            else:
                row += count
        elif item.takes_candidates:
            found.append((part, candidates[candidate : candidate + count]))
            candidate += count
        else:
            found.append((part, rows[row : row + count]))
            row += count
    return found
