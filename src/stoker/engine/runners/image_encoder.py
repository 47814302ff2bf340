"""The pictures that a model's running sequences wait for: encoded once each, in slices (SPEC V3, C11).

Owns what is being encoded and the embeddings in use. Embeddings are kept as entries of the prefix cache, in a
namespace of their own, so they share its budgets, its disk and its restarts. Who runs, and when there is time
for a slice, is decided elsewhere.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.backends.protocol.backend import Placed
from stoker.cache.entry import Entry, EntryState
from stoker.cache.keys import Namespace, num_tokens
from stoker.errors import StepFailedError
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Backend, Rows
    from stoker.backends.protocol.vision import Encoding, Vision
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.kv.sequence import ImageSpan, Sequence

log = logging.getLogger(__name__)

_FLOATS = np.dtype("<f4")
_SPACE = "embeddings of pictures"


@dataclass(slots=True, eq=False)
class _Wish:
    """A picture that is wanted, and by whom."""

    span: ImageSpan
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders wishes: people first, then who came first."""
        return (
            all(sequence.is_background for sequence in self.sequences),
            min(sequence.arrival_s for sequence in self.sequences),
        )

    @property
    def is_over(self) -> bool:
        """Whether all who wanted it have ended."""
        return all(sequence.state is SequenceState.DONE for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class _EncodeJob:
    """The picture that is being encoded."""

    wish: _Wish
    encoding: Encoding


class ImageEncoder:
    """Embeddings of one model's pictures.

    Args:
        backend: the model; it has a projector.
        vision: that projector.
        cache: where embeddings are kept.
        source: path of the model's file.

    Attributes:
        num_encoded_total: pictures encoded so far.
        num_reused_total: places of pictures that found their embeddings there.
    """

    def __init__(self, backend: Backend, vision: Vision, cache: PrefixCache, source: str) -> None:
        self.num_encoded_total = 0
        self.num_reused_total = 0
        self._backend = backend
        self._vision = vision
        self._cache = cache
        self._source = source
        self._model = backend.capabilities.fingerprint
        self._namespace = Namespace(vision.fingerprint, adapter=_SPACE).digest
        self._job: _EncodeJob | None = None
        self._failed: list[tuple[Sequence, StepFailedError]] = []
        self._fresh: dict[bytes, tuple[Rows, _Wish]] = {}

    def __repr__(self) -> str:
        return f"<ImageEncoder {self.num_encoded_total} encoded, at {self._job}>"

    # ------------------------------------------------------------ questions

    def has_work(self, running: Iterable[Sequence]) -> bool:
        """Whether a picture of theirs is to be encoded, or its embeddings are there to be given out."""
        return any(not self._is_reading(span) for sequence in running for span in sequence.unencoded_images)

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {
            "images_encoded_total": self.num_encoded_total,
            "images_reused_total": self.num_reused_total,
        }

    # ------------------------------------------------------------ a turn

    def tend(self, running: Iterable[Sequence], now: float) -> None:
        """Give sequences the embeddings that are there, and choose what is encoded next."""
        self._tidy()
        wishes: dict[bytes, _Wish] = {}
        for sequence in running:
            self._place(sequence, now)
            for span in sequence.unencoded_images:
                wishes.setdefault(span.key, _Wish(span)).sequences.append(sequence)
        if self._job is not None:
            self._join(self._job.wish, wishes)
        else:
            self._choose(wishes, now)

    def run(self, budget_s: float, now: float) -> None:
        """Encode for about so long."""
        job = self._job
        if job is None:
            return
        try:
            if not job.encoding.run(budget_s):
                return
            rows = job.encoding.result()
        except StepFailedError as error:
            log.warning("a picture could not be encoded: %s", error)
            self._failed += [(sequence, error) for sequence in job.wish.sequences]
            self._job = None
            return
        self._job = None
        self.num_encoded_total += 1
        self._fresh[job.wish.span.key] = rows, job.wish
        self._keep(job.wish, rows, now)

    @property
    def is_encoding(self) -> bool:
        """Whether a slice would compute something."""
        return self._job is not None

    def take_failed(self) -> list[tuple[Sequence, StepFailedError]]:
        """Sequences whose pictures failed since the last call; the caller ends them."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Give up what is being encoded; idempotent."""
        if self._job is not None:
            self._job.encoding.cancel()
            self._job = None
        self._fresh.clear()

    # ------------------------------------------------------------ embeddings that are there

    def _place(self, sequence: Sequence, now: float) -> None:
        """Tell the backend of embeddings it gets now, and of those that are computed and can go."""
        placed = list(sequence.conditioning.pictures)
        ends = {span.start: span.end for span in sequence.images}
        needed = [each for each in placed if ends[each.start] > sequence.num_computed]
        found = [(span, self._rows_of(span, now)) for span in sequence.unencoded_images]
        new = [Placed(span.start, rows) for span, rows in found if rows is not None]
        if (new or len(needed) < len(placed)) and sequence.slot is not None:
            pictures = tuple(sorted([*needed, *new], key=lambda each: each.start))
            sequence.conditioning = msgspec.structs.replace(sequence.conditioning, pictures=pictures)
            conditioner = self._backend.extensions.conditioner
            assert conditioner is not None, f"{self._backend!r} has a projector and takes no pictures"
            conditioner.condition(sequence.slot, sequence.conditioning)

    def _rows_of(self, span: ImageSpan, now: float) -> Rows | None:
        """What stands at a place, float32 (num_tokens, n_embd); None: it is not there yet."""
        rows = self._picture_rows(span, now)
        return None if rows is None else rows[span.offset : span.offset + span.num_tokens]

    def _picture_rows(self, span: ImageSpan, now: float) -> Rows | None:
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

    def _keep(self, wish: _Wish, rows: Rows, now: float) -> None:
        """Store embeddings for later turns, other conversations and after a restart, if there is room."""
        if not any(sequence.shares for sequence in wish.sequences):
            return
        data = rows.astype(_FLOATS).tobytes()
        new = Entry(
            namespace=self._namespace,
            model=self._model,
            source=self._source,
            key=wish.span.key,
            size_bytes=len(data),
            is_exact=True,
            is_background=wish.rank[0],
        )
        entry = self._cache.store(new, now)
        if entry is not None:
            self._cache.filled(entry, data, now)

    def _tidy(self) -> None:
        """What nobody needs any more goes."""
        if self._job is not None and self._job.wish.is_over:
            self._job.encoding.cancel()
            self._job = None
        for key, (_, wish) in list(self._fresh.items()):
            if all(_is_past(sequence, key) for sequence in wish.sequences):
                del self._fresh[key]

    # ------------------------------------------------------------ what is next

    @staticmethod
    def _join(wish: _Wish, wishes: dict[bytes, _Wish]) -> None:
        """Whoever wants the picture that is being encoded waits for it."""
        others = wishes.get(wish.span.key)
        if others is not None:
            known = set(map(id, wish.sequences))
            wish.sequences += [sequence for sequence in others.sequences if id(sequence) not in known]

    def _choose(self, wishes: dict[bytes, _Wish], now: float) -> None:
        """Have read from disk what is there, and begin the most urgent of the others."""
        missing = []
        for wish in wishes.values():
            entry = self._cache.index.get(self._namespace, wish.span.key)
            if entry is None or not self._fetch(entry, wish, now):
                missing.append(wish)
        if missing:
            wish = min(missing, key=lambda each: each.rank)
            self._job = _EncodeJob(wish, self._vision.begin(wish.span.picture))

    def _fetch(self, entry: Entry, wish: _Wish, now: float) -> bool:
        """Whether its embeddings are on their way."""
        if entry.state is EntryState.DISK and self._cache.can_fetch(entry):
            self._cache.fetch(entry, wish.span.key)
            self._cache.settle(entry, wish.span.key, now)
        return entry.state is EntryState.READING


def _is_past(sequence: Sequence, key: bytes) -> bool:
    """Whether it needs the embeddings of that picture no longer, as far as can be seen."""
    if sequence.state is SequenceState.DONE:
        return True
    return all(span.key != key or span.end <= sequence.num_computed for span in sequence.images)
