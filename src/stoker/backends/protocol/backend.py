"""What a backend is: one loaded model on one device, driven one step at a time by one thread.

A backend knows sequences by small integers (`seq`, 0 <= seq < num_sequences) and computes the tokens that a
plan holds; the scheduler chooses them, `stoker.sampling` draws from the logits.

Contract (tests/contract runs it on every backend):
- positions of a sequence are consecutive: an item's `start` equals the sequence's length;
- a step that raises, in `launch` or in `rows`, leaves every sequence as it was before the step;
- rows are float32 (num_rows, n_vocab), in plan order, valid until the next call of `launch`; so are the
  candidates of items that take those in place of rows;
- one step is in flight at a time, and nothing else is called between `launch` and `rows`;
- `fork`, `trim`, `drop` cost no computation; `drop` of an empty sequence is allowed.

What not every backend has is in `extensions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import numpy as np

from stoker.backends.protocol.scoring import ScoringLane
from stoker.errors import StepFailedError
from stoker.ipc.model import KVLayout, ModelClass

if TYPE_CHECKING:
    import numpy.typing as npt

    from stoker.backends.protocol.extensions import Extensions

Buffer: TypeAlias = bytes | bytearray | memoryview
Rows: TypeAlias = "npt.NDArray[np.float32]"


class PlanItem(msgspec.Struct, frozen=True):
    """Tokens to append to one sequence in one step.

    Attributes:
        seq: the backend's sequence number.
        start: position of the first token; equals the sequence's current length.
        tokens: token ids, at least one.
        num_logits: how many of the last tokens want a row of logits (0 .. len(tokens)).
        takes_candidates: the largest logits of each row are enough; only where the backend has `Draws`.
    """

    seq: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    takes_candidates: bool = False


class BatchPlan(msgspec.Struct, frozen=True):
    """One step: items of distinct sequences, in order; rows come back in the same order.

    Attributes:
        items: what each sequence gets.
        is_rows: each is one token that is no image's, with a row of logits; false where that is not known.
    """

    items: tuple[PlanItem, ...]
    is_rows: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.items) if self.is_rows else sum([len(item.tokens) for item in self.items])

    @property
    def num_rows(self) -> int:
        """Rows of logits the step computes."""
        return len(self.items) if self.is_rows else sum([item.num_logits for item in self.items])

    @property
    def has_pictures(self) -> bool:
        """Whether any item is of an image's tokens, which are below 0."""
        for item in self.items:  # noqa: SIM110 - asked each step, without a generator
            if item.tokens[0] < 0:
                return True
        return False


class Grid(msgspec.Struct, frozen=True):
    """Positions of an image's tokens in four dimensions (M-RoPE), beside that of its first (SPEC V6).

    Attributes:
        num_positions: how far the text after it is from its first token.
        offsets: int32 (4, num_tokens): time, height, width, and one of no use.
    """

    num_positions: int
    offsets: bytes


class PicturePart(msgspec.Struct, frozen=True):
    """An image, or a part of one, among the tokens of a prompt.

    Attributes:
        num_tokens: its embeddings.
        grid: where its tokens lie; None: one after the other, as those of text.
        is_mutual: its tokens see each other in both directions, so all are computed in one call (SPEC V7).
    """

    num_tokens: int
    grid: Grid | None = None
    is_mutual: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are computed as those of text are."""
        return self.grid is None and not self.is_mutual


class Placed(msgspec.Struct, frozen=True, eq=False):
    """An image's place in a sequence: its embeddings stand where tokens would (SPEC V3).

    Attributes:
        start: tokens of the sequence before it.
        embeddings: float32 (num_tokens, n_embd).
        part: what they are of; empty: of an image whose tokens are computed as those of text are.
    """

    start: int
    embeddings: Rows
    part: PicturePart = PicturePart(0)


class Conditioning(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence's tokens are computed with beside themselves.

    Attributes:
        adapters: name and scale of each LoRA adapter, in the order of names (SPEC K6).
        source: what the encoder of an encoder-decoder reads (SPEC K3).
        images: where embeddings stand in place of tokens, in order of their starts.
        asked: the tokens of a prompt of which every row will be asked (SPEC D6). However it comes in slices,
            its rows are those of the whole.
        lane: of `asked`, which is scored in turns with other texts.
        namespace: what is computed beside the sequence's own cells is used again in this one only: a caller
            must not learn from the clock what another has asked (SPEC C1).
    """

    adapters: tuple[tuple[str, float], ...] = ()
    source: tuple[int, ...] = ()
    pictures: tuple[Placed, ...] = ()
    asked: tuple[int, ...] = ()
    lane: ScoringLane = ScoringLane.PROMPTS
    namespace: bytes = b""


PLAIN = Conditioning()
"""Tokens and nothing beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a loaded model can do and the limits that resulted (SPEC K7).

    `n_ctx` is the most tokens one sequence may hold, `num_cells` what all may hold together: a pool may be
    larger than the context the model was trained on, and streams hold `num_cells // num_sequences` each.

    `fingerprint` is hexadecimal and differs wherever an exported state would not fit: another file, library,
    key type or attention. `state_layout` names the tensors of a recurrent model's state with their shapes
    (SPEC K5); it is empty where there is no such state. `decoder_start` is the token that the decoder of an
    encoder-decoder begins with; None: it is none. `adapters` are name and fingerprint of each LoRA adapter.
    `pairing` and `pairing_reason` say how the model stands with its projector (SPEC V1), `hears_hz` at how
    many samples a second it takes recordings (SPEC V9), all as in `ModelInfo`.
    `shares_cells`: a fork copies nothing, its cells are those of its source; not without `can_trim`.
    `is_async`: `launch` returns while the device still computes. `trial_token_s` is what a token took in a
    trial of where it lies now; 0: that was not measured. `is_repeatable` is as in `ModelInfo`;
    `repeatable_cost` how much longer a step takes for it as a trial has measured it, 0.15 being 15 %, and
    None where none has.
    """

    model_class: ModelClass
    architecture: str
    description: str
    label: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    num_cells: int
    n_batch: int
    num_sequences: int
    num_params: int
    size_bytes: int
    kv_type: str
    flash_attention: str
    kv_layout: KVLayout = KVLayout.POOL
    is_repeatable: bool = False
    repeatable_cost: float | None = None
    can_trim: bool
    can_fork: bool
    shares_cells: bool = False
    has_vision: bool = False
    hears_hz: int = 0
    pairing: str = ""
    pairing_reason: str = ""
    computes_on_cpu: bool = False
    is_async: bool = False
    trial_token_s: float = 0.0
    fingerprint: str = ""
    state_layout: tuple[tuple[str, tuple[int, ...]], ...] = ()
    decoder_start: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()


class Vocabulary(Protocol):
    """Text to tokens and back; safe to call from worker threads."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS as the model asks, `parse_special` reads control tokens.
        """
        ...

    def least_tokens(self, text: str, enough: int) -> int:
        """Tokens that `text` has at the least, found without tokenising it or copying it as a whole.

        Counting ends where there are more than `enough`.
        """
        ...

    def pair(self, query: str, document: str) -> list[int]:
        """Token ids of a query and a document as a cross-encoder reads them (SPEC K4).

        Control tokens in either are text: no document ends the query or begins another.
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a generated token adds to the text; empty for control tokens."""
        ...

    def special_piece(self, token: int) -> bytes:
        """Like `piece`, with control tokens spelled out; empty for a row of logits that no token has."""
        ...

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        ...

    @property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        ...

    @property
    def added_bos(self) -> int | None:
        """The token that `add_special` puts before every text; None: it puts none there."""
        ...

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text, empty if there is none."""
        ...

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text, empty if there is none."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The largest raw logits of some rows and the tokens that have them.

    Attributes:
        ids: int32 (num_rows, count).
        logits: float32 (num_rows, count), the largest first, equal ones in any order. A row of the model that
            holds a NaN anywhere begins with one here.
    """

    ids: npt.NDArray[np.int32]
    logits: Rows

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | npt.NDArray[np.intp]) -> Candidates:
        return Candidates(self.ids[rows], self.logits[rows])


NO_CANDIDATES = Candidates(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


class InFlight(Protocol):
    """A step that was launched."""

    def rows(self) -> Rows:
        """Wait for the step; may be called again.

        Returns:
            float32 (rows, n_vocab), raw logits of the items that do not take candidates, a view valid until
            the next `launch`.

        Raises:
            StepFailedError: the device failed; nothing changed.
        """
        ...

    def candidates(self) -> Candidates:
        """Those of the items that take them, valid until the next `launch`; `rows` was called before."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """An `InFlight` that was computed in `launch`."""

    found: Rows
    best: Candidates = NO_CANDIDATES

    def rows(self) -> Rows:
        """What was computed."""
        return self.found

    def candidates(self) -> Candidates:
        """The largest of what was computed."""
        return self.best


class Backend(Protocol):
    """One loaded model: what every backend has."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, resolved after load."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """Its tokenizer."""
        ...

    @property
    def extensions(self) -> Extensions:
        """What it has beyond this protocol."""
        ...

    def launch(self, plan: BatchPlan) -> InFlight:
        """Begin one forward pass; it may be over when this returns (`Capabilities.is_async` is false).

        Tokens of an item at an image's place are the numbers that stand for it (`cache.radix.image_ids`);
        an item is all of one image or all of tokens, and embeddings are computed in the tokens' place.

        Raises:
            PoolFullError: no cells for these tokens; nothing changed.
            StepFailedError: the native decode failed; nothing changed.
            StepAbortedError: `StepAbort` has ended it; nothing changed.
        """
        ...

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`.

        Raises:
            UnsupportedError: `can_fork` is false.
        """
        ...

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            UnsupportedError: `can_trim` is false and 0 < length < the sequence's length.
        """
        ...

    def drop(self, seq: int) -> None:
        """Forget the sequence and its initial state, and free its cells."""
        ...

    def length(self, seq: int) -> int:
        """Tokens the sequence holds."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by line: weights, kv, compute; in all memory, devices' (`OnDevices`) and the machine's."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


class Lengths:
    """Lengths of `num_sequences` sequences, all empty at first.

    Args:
        num_sequences: sequences are numbered 0 .. num_sequences - 1.
        n_vocab: token ids are 0 .. n_vocab - 1, those that stand for an image negative.
        n_batch: tokens one plan may carry.
    """

    def __init__(self, num_sequences: int, n_vocab: int, n_batch: int) -> None:
        self._lengths = [0] * num_sequences
        self._n_vocab = n_vocab
        self._n_batch = n_batch

    def __repr__(self) -> str:
        held = {seq: length for seq, length in enumerate(self._lengths) if length}
        return f"<Lengths of {len(self._lengths)} sequences: {held}>"

    def __getitem__(self, seq: int) -> int:
        if not 0 <= seq < len(self._lengths):
            raise IndexError(f"sequence {seq} is not in 0 .. {len(self._lengths) - 1}")
        return self._lengths[seq]

    def __setitem__(self, seq: int, length: int) -> None:
        self._lengths[seq] = length

    @property
    def total(self) -> int:
        """Of all sequences; a token that several share counts in each."""
        return sum(self._lengths)

    def check(self, plan: BatchPlan) -> None:
        """Raise StepFailedError where an item is malformed or does not continue its sequence."""
        assert plan.items, "a plan without items"
        assert plan.num_tokens <= self._n_batch, f"{plan.num_tokens} tokens in a batch of {self._n_batch}"
        lengths, n_vocab, seen = self._lengths, self._n_vocab, set()
        for item in plan.items:
            tokens, seq = item.tokens, item.seq
            seen.add(seq)
            if not (  # a decode row, the common case
                len(tokens) == 1
                and 0 <= tokens[0] < n_vocab
                and 0 <= seq < len(lengths)
                and item.start == lengths[seq]
                and 0 <= item.num_logits <= 1
            ):
                self._check_item(item)
        assert len(seen) == len(plan.items), "a sequence twice in one plan"

    def advance(self, plan: BatchPlan) -> None:
        """Count the tokens of a plan that was computed."""
        for item in plan.items:
            self._lengths[item.seq] = item.start + len(item.tokens)

    def _check_item(self, item: PlanItem) -> None:
        seq, tokens = item.seq, item.tokens
        if not 0 <= seq < len(self._lengths):
            raise StepFailedError(f"sequence {seq} is not in 0 .. {len(self._lengths) - 1}", seq=seq)
        length = self._lengths[seq]
        if item.start != length:
            raise StepFailedError(
                f"sequence {seq} holds {length} tokens, the step starts at {item.start}",
                seq=seq,
                length=length,
            )
        if not tokens or not 0 <= item.num_logits <= len(tokens):
            raise StepFailedError(
                f"sequence {seq}: {item.num_logits} rows of logits asked of {len(tokens)} tokens", seq=seq
            )
        if max(tokens) < 0:
            return  # an image's: whether its embeddings are there is the backend's to see
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            raise StepFailedError(
                f"sequence {seq} has tokens {min(tokens)} .. {max(tokens)}, 0 .. {self._n_vocab - 1} exist",
                seq=seq,
            )
