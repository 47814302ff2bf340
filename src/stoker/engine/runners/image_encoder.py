"""The images that a model's running sequences wait for: encoded once each, in slices (SPEC V3, C11).

Owns what is being encoded, the embeddings in use, and when there is time for a slice: between steps, as long
as no decoding reader waits longer for it. Embeddings are kept as entries of the prefix cache, in a namespace
of their own, so they share its budgets, its disk and its restarts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.backends.protocol.backend import Placed
from stoker.cache.entry import Entry, EntryState
from stoker.cache.radix import Namespace, num_tokens
from stoker.errors import StepFailedError, StokerError
from stoker.kv.sequence import SequenceState
from stoker.scheduler.slice_budget import SliceBudget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Backend, Rows
    from stoker.backends.protocol.vision import Encoding, Vision
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.threads.timer import StepTimer
    from stoker.kv.sequence import ImageSpan, Sequence
    from stoker.scheduler.plan import Planned, StepPlan
    from stoker.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_FLOATS = np.dtype("<f4")
_SPACE = "embeddings of pictures"


@dataclass(slots=True, eq=False)
class _Wanted:
    """An image that is wanted, and the sequences that want it."""

    span: ImageSpan
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders them: interactive ones first, then by arrival."""
        return (
            all(sequence.is_background for sequence in self.sequences),
            min(sequence.arrival_s for sequence in self.sequences),
        )

    @property
    def is_over(self) -> bool:
        """Whether every sequence that wanted it has ended."""
        return all(sequence.state is SequenceState.DONE for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class _EncodeJob:
    """The image that is being encoded."""

    image: _Wanted
    encoding: Encoding


class ImageEncoder:
    """The images of one model: their embeddings, and when each is encoded.

    Args:
        backend: the model; it has a projector.
        vision: that projector.
        scheduler: of the model, whose running sequences have the images.
        pace: surrounds native calls.
        cache: where embeddings are kept.

    Attributes:
        num_encoded_total: images encoded so far.
        num_reused_total: places of images that found their embeddings there.
    """

    def __init__(
        self, backend: Backend, vision: Vision, scheduler: Scheduler, timer: StepTimer, cache: PrefixCache
    ) -> None:
        self.num_encoded_total = 0
        self.num_reused_total = 0
        self._backend = backend
        self._vision = vision
        self._cache = cache
        self._scheduler = scheduler
        self._timer = timer
        self._budget = SliceBudget(scheduler.limits.target_step_s)
        self._model = backend.capabilities.fingerprint
        self._namespace = Namespace(vision.fingerprint, adapter=_SPACE).digest
        self._job: _EncodeJob | None = None
        self._failed: list[tuple[Sequence, StokerError]] = []
        self._fresh: dict[bytes, tuple[Rows, _Wanted]] = {}

    def __repr__(self) -> str:
        return f"<ImageEncoder {self.num_encoded_total} encoded, at {self._job}>"

    # ------------------------------------------------------------ questions

    @property
    def _running(self) -> Iterable[Sequence]:
        return self._scheduler.slots.running

    @property
    def has_work(self) -> bool:
        """Whether an image is to be encoded, or embeddings can be given out."""
        return any(
            not self._is_reading(span) for sequence in self._running for span in sequence.unencoded_images
        )

    @property
    def is_encoding(self) -> bool:
        """Whether a slice would compute something."""
        return self._job is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a running sequence can do nothing before an image is encoded."""
        return any(sequence.awaits_image for sequence in self._running)

    @property
    def goes_first(self) -> bool:
        """Whether all interactive sequences wait for images: steps of background would delay them."""
        waiting = [each for each in self._running if not each.is_background]
        return self.is_encoding and bool(waiting) and all(each.awaits_image for each in waiting)

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {
            "images_encoded_total": self.num_encoded_total,
            "images_reused_total": self.num_reused_total,
        }

    # ------------------------------------------------------------ a turn

    def tend(self, now: float) -> list[tuple[Sequence, StokerError]]:
        """Give sequences the embeddings that are there, and choose what is encoded next.

        Returns:
            Sequences whose images have failed; the caller ends them.
        """
        self._tidy()
        wanted: dict[bytes, _Wanted] = {}
        for sequence in self._running:
            self._place(sequence, now)
            for span in sequence.unencoded_images:
                wanted.setdefault(span.key, _Wanted(span)).sequences.append(sequence)
        if self._job is not None:
            self._join(self._job.image, wanted)
        else:
            self._choose(wanted, now)
        failed, self._failed = self._failed, []
        return failed

    def encode(self, plan: StepPlan | None, took_s: float) -> None:
        """Encode for a slice, after a step of `plan` that took so long; None: there was nothing to step."""
        if self._job is None or not self.has_work:
            return
        budget_s = self._time_after(plan, took_s)
        if not budget_s:
            return
        begun_s = self._timer.now()
        self._timer.begin(1)
        try:
            self._run(self._job, budget_s, begun_s)
        finally:
            self._timer.abandon()
        self._budget.spent(self._timer.now() - begun_s)

    def _time_after(self, plan: StepPlan | None, took_s: float) -> float:
        """Seconds for a slice after that step; 0: not now."""
        if plan is None or not _has_readers(plan):
            self._budget.idle()
        elif any(_is_of_image(part) for part in plan.parts):
            return 0.0  # the step was the longer for another's image already
        elif not self._scheduler.bursts.suits(took_s):
            self._budget.stepped(took_s)
        elif not self._scheduler.bursts.is_due:
            return 0.0
        else:
            self._scheduler.bursts.taken()
            self._budget.idle()
        return self._budget.next_s()

    def _run(self, job: _EncodeJob, budget_s: float, now: float) -> None:
        try:
            if not job.encoding.run(budget_s):
                return
            rows = job.encoding.result()
        except StepFailedError as error:
            log.warning("an image could not be encoded: %s", error)
            self._failed += [(sequence, error) for sequence in job.image.sequences]
            self._job = None
            return
        self._job = None
        self.num_encoded_total += 1
        self._fresh[job.image.span.key] = rows, job.image
        self._keep(job.image, rows, now)

    def close(self) -> None:
        """Give up what is being encoded; idempotent."""
        if self._job is not None:
            self._job.encoding.cancel()
            self._job = None
        self._fresh.clear()

    # ------------------------------------------------------------ embeddings that are there

    def _place(self, sequence: Sequence, now: float) -> None:
        """Give the backend embeddings it needs now, and take away those that are computed."""
        placed = list(sequence.conditioning.pictures)
        ends = {span.start: span.end for span in sequence.images}
        needed = [each for each in placed if ends[each.start] > sequence.num_computed]
        found = [(span, self._rows_of(span, now)) for span in sequence.unencoded_images]
        new = [Placed(span.start, rows, span.part) for span, rows in found if rows is not None]
        if (new or len(needed) < len(placed)) and sequence.slot is not None:
            pictures = tuple(sorted([*needed, *new], key=lambda each: each.start))
            sequence.conditioning = msgspec.structs.replace(sequence.conditioning, pictures=pictures)
            conditioner = self._backend.extensions.conditioner
            assert conditioner is not None, f"{self._backend!r} has a projector and takes no pictures"
            try:
                conditioner.condition(sequence.slot, sequence.conditioning)
            except StokerError as error:
                self._failed.append((sequence, error))

    def _rows_of(self, span: ImageSpan, now: float) -> Rows | None:
        """What stands at a place, float32 (num_tokens, n_embd); None: it is not there yet."""
        rows = self._image_rows(span, now)
        return None if rows is None else rows[span.offset : span.offset + span.num_tokens]

    def _image_rows(self, span: ImageSpan, now: float) -> Rows | None:
        if span.key in self._fresh:
            return self._fresh[span.key][0]
        entry = self._cache.index.get(self._namespace, span.key)
        if entry is None or entry.state is not EntryState.RAM or entry.data is None:
            return None
        self._cache.used(entry, now)
        self.num_reused_total += 1
        rows = np.frombuffer(entry.data, _FLOATS).reshape(num_tokens(span.key), -1)
        return rows.astype(np.float32, copy=False)

    def _is_reading(self, span: ImageSpan) -> bool:
        entry = self._cache.index.get(self._namespace, span.key)
        return entry is not None and entry.state is EntryState.READING

    def _keep(self, image: _Wanted, rows: Rows, now: float) -> None:
        """Store embeddings for later turns, other conversations and after a restart, if they fit."""
        if not any(sequence.shares for sequence in image.sequences):
            return
        data = rows.astype(_FLOATS).tobytes()
        new = Entry(
            namespace=self._namespace,
            model=self._model,
            source=self._scheduler.limits.source,
            key=image.span.key,
            size_bytes=len(data),
            is_exact=True,
            is_background=image.rank[0],
        )
        entry = self._cache.store(new, now)
        if entry is not None:
            self._cache.filled(entry, data, now)

    def _tidy(self) -> None:
        """Free what no sequence needs any more."""
        if self._job is not None and self._job.image.is_over:
            self._job.encoding.cancel()
            self._job = None
        for key, (_, image) in list(self._fresh.items()):
            if all(_is_past(sequence, key) for sequence in image.sequences):
                del self._fresh[key]

    # ------------------------------------------------------------ what is next

    @staticmethod
    def _join(image: _Wanted, wanted: dict[bytes, _Wanted]) -> None:
        """Sequences that want the image that is being encoded wait for it."""
        others = wanted.get(image.span.key)
        if others is not None:
            known = set(map(id, image.sequences))
            image.sequences += [sequence for sequence in others.sequences if id(sequence) not in known]

    def _choose(self, wanted: dict[bytes, _Wanted], now: float) -> None:
        """Have read from disk what is there, and begin the most urgent of the others."""
        missing = []
        for image in wanted.values():
            entry = self._cache.index.get(self._namespace, image.span.key)
            if entry is None or not self._fetch(entry, image, now):
                missing.append(image)
        if missing:
            image = min(missing, key=lambda each: each.rank)
            self._job = _EncodeJob(image, self._vision.begin(image.span.image))

    def _fetch(self, entry: Entry, image: _Wanted, now: float) -> bool:
        """Whether its embeddings are on their way."""
        if entry.state is EntryState.DISK and self._cache.can_fetch(entry):
            self._cache.fetch(entry, image.span.key)
            self._cache.settle(entry, image.span.key, now)
        return entry.state is EntryState.READING


def _is_past(sequence: Sequence, key: bytes) -> bool:
    """Whether it needs the embeddings of that image no longer, as far as can be seen."""
    if sequence.state is SequenceState.DONE:
        return True
    return all(span.key != key or span.end <= sequence.num_computed for span in sequence.images)


def _has_readers(plan: StepPlan) -> bool:
    return any(
        part.sequence.state is SequenceState.DECODE and not part.sequence.is_background for part in plan.parts
    )


def _is_of_image(part: Planned) -> bool:
    return part.item.tokens[0] < 0
