"""A model of MLX behind the backend protocol: puts network, sequences and states together."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.native import BLAS, enter_thread, is_on_device
from stoker.backends.mlx.scoring import MlxScoring, ScoringContext
from stoker.backends.mlx.sequences import MlxSequences
from stoker.backends.mlx.state import HeldSequence, StateFormat
from stoker.backends.mlx.step import NUM_CANDIDATES, Steps, failure
from stoker.backends.protocol.backend import BatchPlan, Capabilities, Conditioning, Lengths, PlanItem
from stoker.backends.protocol.extensions import Extensions
from stoker.backends.protocol.scoring import ScoringLane
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    from stoker.backends.mlx.network import Network
    from stoker.backends.mlx.text.vocabulary import FolderVocabulary
    from stoker.backends.mlx.vision.vision import MlxVision
    from stoker.backends.protocol.backend import Buffer, InFlight

_LOGIT_BYTES = 4


class _Draws:
    """See `Draws`."""

    num_candidates = NUM_CANDIDATES


class _Threads:
    """Threads of the library that multiplies on a CPU; see `Threads`."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.set_threads(num_threads)

    def set_threads(self, num_threads: int) -> None:
        """Use that many from the next step on."""
        self.num_threads = num_threads
        if BLAS is not None:
            BLAS.set_threads(num_threads)


class MlxBackend:
    """One loaded model; made by `load_backend`.

    Args:
        network: its own from here on.
        vocabulary: its tokenizer.
        capabilities: what it can do.
        num_threads: that a step uses on a CPU.
        vision: what it sees with; None: it sees nothing.
    """

    def __init__(
        self,
        network: Network,
        vocabulary: FolderVocabulary,
        capabilities: Capabilities,
        num_threads: int,
        vision: MlxVision | None = None,
    ) -> None:
        found = capabilities
        self._vision = vision
        self._network = network
        self._vocabulary = vocabulary
        self._capabilities = found
        steps = Steps(network, is_async=found.is_async)
        lengths = Lengths(found.num_sequences, found.n_vocab, found.n_batch)
        self._append = partial(steps.append_all, found.n_batch)
        self._steps = steps
        self._sequences = MlxSequences(lengths, found, network.new_caches, self._append)
        self._states = StateFormat(bytes.fromhex(found.fingerprint), network.new_caches)
        self._scorers = {lane: ScoringContext(steps, network.new_caches) for lane in ScoringLane}
        self._threads = _Threads(num_threads) if BLAS is not None and not is_on_device() else None

    def __repr__(self) -> str:
        return f"<MlxBackend {self._capabilities.description!r} {self._sequences!r}>"

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, resolved after load."""
        return self._capabilities

    @property
    def vocabulary(self) -> FolderVocabulary:
        """Its tokenizer."""
        return self._vocabulary

    @property
    def extensions(self) -> Extensions:
        """What MLX has of them."""
        return Extensions(
            conditioner=self,
            states=self,
            recurrent=self if self._capabilities.state_layout else None,
            hidden=self,
            scorer=self,
            vision=self._vision,
            threads=self._threads,
            scratch=self,
            draws=_Draws() if is_on_device() else None,
        )

    def launch(self, plan: BatchPlan) -> InFlight:
        """Begin one forward pass; see `Backend.launch`. A call that raises changed nothing."""
        enter_thread()
        self._sequences.lengths.check(plan)
        if plan.has_pictures and self._vision is None:
            raise StepFailedError("tokens below 0 stand for images, which this model of MLX does not take")
        self._sequences.check_room(plan)
        return self._steps.launch(self._sequences, plan)

    def condition(self, seq: int, conditioning: Conditioning) -> None:
        """Compute the sequence's next tokens with this; UnsupportedError for what the model cannot do."""
        if conditioning.source or (conditioning.pictures and self._vision is None):
            raise UnsupportedError(f"{self._capabilities.description} takes tokens and nothing beside them")
        self._network.adapted.check(conditioning.adapters)
        self._sequences.adapt(seq, conditioning.adapters)
        self._sequences.show(seq, conditioning.pictures)

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`."""
        assert self.length(dst) == 0, f"sequence {dst} is not empty"
        assert 0 < length <= self.length(src), f"{length} of {self.length(src)} tokens to share"
        if not self._capabilities.can_fork:
            raise UnsupportedError(f"{self._capabilities.description} has a state that cannot be shared")
        self._sequences.fork(src, dst, length)

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens. Raises UnsupportedError where the model cannot go back."""
        held = self.length(seq)
        assert 0 <= length <= held, f"{length} of {held} tokens to keep"
        if 0 < length < held and not self._capabilities.can_trim:
            found = self._capabilities.description
            raise UnsupportedError(f"{found} cannot go back from {held} to {length} tokens")
        self._sequences.trim(seq, length)

    def drop(self, seq: int) -> None:
        """Forget the sequence and free its cells."""
        self._sequences.trim(seq, 0)

    def length(self, seq: int) -> int:
        """Tokens the sequence holds."""
        return self._sequences.lengths[seq]

    # ------------------------------------------------------------ states

    def export_state(self, seq: int) -> Buffer:
        """The sequence's state, bit-exact."""
        enter_thread()
        tokens, start = self._sequences.tokens(seq), self._sequences.start(seq)
        caches = self._sequences.copied(seq) if tokens else []
        return self._states.packed(HeldSequence(tokens, caches, start, self._sequences.pictures(seq)))

    def import_state(self, seq: int, data: Buffer) -> None:
        """Put exported state into the empty sequence `seq`; InvalidRequestError, PoolFullError."""
        assert self.length(seq) == 0, f"sequence {seq} is not empty"
        enter_thread()
        self._sequences.take(seq, self._states.unpacked(data))

    def read_state(self, seq: int) -> list[Tensor]:
        """A recurrent model's state after the sequence's tokens; UnsupportedError."""
        self._refuse_without_state()
        enter_thread()
        return self._network.tensors_of(self._sequences.copied(seq))

    def write_state(self, seq: int, tensors: Sequence[Tensor]) -> None:
        """Let the empty sequence `seq` begin from a state; UnsupportedError."""
        self._refuse_without_state()
        assert self.length(seq) == 0, f"sequence {seq} is not empty"
        enter_thread()
        self._sequences.begin_from(seq, self._network.caches_of(tensors))

    def last_hidden(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """What the model made of the last of the sequence's tokens; see `LastHidden`."""
        enter_thread()
        held = self.length(seq)
        assert held in {len(tokens), len(tokens) - 1}, f"sequence {seq} holds {held} of {len(tokens)} tokens"
        if held == len(tokens) and not self._capabilities.can_trim:
            return self._computed_again(seq, tokens)
        if held == len(tokens):
            self._sequences.trim(seq, held - 1)
        self.launch(BatchPlan((PlanItem(seq, len(tokens) - 1, tokens[-1:], 1),))).rows()
        return self._network.hidden()

    def scoring(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        namespace: bytes = b"",
        lane: ScoringLane = ScoringLane.CHOICES,
    ) -> MlxScoring:
        """How likely texts are after a prompt; see `TextScorer`."""
        return MlxScoring(self._scorers[lane], prompt, texts, namespace)

    def _computed_again(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """The last hidden state of a model that cannot go back by a token, from the first one on."""
        start, adapters = self._sequences.start(seq), self._sequences.adapters(seq)
        caches = kinds.shared(start) if start else self._network.new_caches()
        try:
            self._append(caches, tokens[:-1], adapters)
            self._steps.forward(caches, tokens[-1:], 1, adapters)
            return self._network.hidden()
        except RuntimeError as error:
            raise failure(error) from error

    def _refuse_without_state(self) -> None:
        if not self._capabilities.state_layout:
            found = self._capabilities
            raise UnsupportedError(
                f"{found.description} is a {found.model_class} model ({found.architecture}):"
                " it has no recurrent state to begin from or to save",
                param="state",
            )

    # ------------------------------------------------------------ memory

    def memory(self) -> dict[str, int]:
        """Bytes by line. Keys count as if every cell were taken: they are when they are needed."""
        found, network = self._capabilities, self._network
        cells = network.cell_bytes * found.num_cells + network.sequence_bytes * found.num_sequences
        scores = sum(scorer.size_bytes for scorer in self._scorers.values())
        rows = found.num_sequences * found.n_vocab * _LOGIT_BYTES
        lines = {
            "weights": network.weight_bytes,
            "kv": max(cells, self._sequences.size_bytes),
            "compute": network.work_bytes * found.n_batch + rows + scores,
        }
        if found.adapters:
            lines["adapters"] = network.adapted.size_bytes
        if self._vision is not None:
            lines["projector"] = self._vision.size_bytes
        return lines

    def give_back(self) -> None:
        """Free prompts of scores, and what MLX keeps of freed memory."""
        for scorer in self._scorers.values():
            scorer.forget()
        mx.clear_cache()

    def check(self) -> None:
        """Assert that what is known of the sequences agrees."""
        self._sequences.check()

    def close(self) -> None:
        """Free everything; idempotent."""
        self.give_back()
        if self._vision is not None:
            self._vision.close()
            self._vision = None
        self._sequences.clear()
        self._network.close()
        gc.collect()
        mx.clear_cache()
