"""What an encoder is: one loaded model that turns whole texts into vectors, driven by one thread (SPEC K2).

It keeps nothing of a text from one call to the next, so it knows no sequences and no cells. The engine
chooses the texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.protocol.backend import Capabilities, Rows, Vocabulary
    from stoker.backends.protocol.extensions import Extensions


@runtime_checkable
class Encoder(Protocol):
    """One loaded encoder.

    Of its `Capabilities`, `n_ctx` is the most tokens a text may have, `n_batch` what one call should carry
    and `num_sequences` the most texts it may; there are no cells.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, resolved after load."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """Its tokenizer."""
        ...

    @property
    def pooling(self) -> str:
        """How one vector is made of a text's tokens: mean, cls, last; rank: it scores pairs (SPEC K4)."""
        ...

    @property
    def n_embd(self) -> int:
        """Width of a vector."""
        ...

    @property
    def extensions(self) -> Extensions:
        """What it has beyond this protocol; of an encoder `threads` alone."""
        ...

    def encode(self, texts: Sequence[Sequence[int]]) -> Rows:
        """One forward pass over whole texts; a vector does not depend on the texts beside it.

        Where it pools by rank, a text is a pair as `Vocabulary.pair` writes it, and a row holds the raw
        outputs of its classifier.

        Args:
            texts: token ids of each, 1 to `n_ctx`; together at most `n_batch`, or one longer text alone.

        Returns:
            float32 (len(texts), n_embd or outputs), the caller's own; not normalised.

        Raises:
            StepFailedError: the native encode failed.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by line: weights, compute."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


def check_texts(texts: Sequence[Sequence[int]], limits: Capabilities) -> None:
    """Assert what `Encoder.encode` asks of its caller: native code ends the process on anything else."""
    lengths = [len(text) for text in texts]
    assert 0 < len(texts) <= limits.num_sequences, f"{len(texts)} texts, at most {limits.num_sequences}"
    assert min(lengths) > 0, "a text without a token"
    assert max(lengths) <= limits.n_ctx, f"a text of {max(lengths)} tokens, at most {limits.n_ctx}"
    total = sum(lengths)
    assert len(texts) == 1 or total <= limits.n_batch, f"{total} tokens, at most {limits.n_batch}"
    for text in texts:
        assert 0 <= min(text) <= max(text) < limits.n_vocab, "a token outside the vocabulary"
