"""What tells vocabularies apart: token ids go from one model to another only where they mean the same.

Computed on the thread of a load: a whole vocabulary takes as long as some steps.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Vocabulary

SAMPLED = 4096
"""Tokens of a sample, evenly spaced: some milliseconds at a load."""


class VocabularyDigests(NamedTuple):
    """Equal ones: the ids mean the same texts, and the same ones end an answer.

    Attributes:
        sample: 16 hexadecimal digits of some of the tokens, by which machines that are to serve one file find
            that they do not.
        whole: 32 of all of them, for a model that has several ways to be served, which are several files;
            empty: it has one.
    """

    sample: str = ""
    whole: str = ""


def digests_of(vocabulary: Vocabulary, n_vocab: int, *, has_ways: bool = False) -> VocabularyDigests:
    """Of a vocabulary and its rows of logits; `has_ways`: the whole one is needed too."""
    some, head = range(0, n_vocab, max(1, n_vocab // SAMPLED)), (n_vocab, sorted(vocabulary.eog_tokens))
    sample = _digest(vocabulary, some, head, digest_size=8)
    whole = (*head, vocabulary.added_bos)
    return VocabularyDigests(sample, _digest(vocabulary, range(n_vocab), whole, 16) if has_ways else "")


def _digest(vocabulary: Vocabulary, tokens: range, head: tuple[object, ...], digest_size: int) -> str:
    digest = blake2b(repr(head).encode(), digest_size=digest_size)
    for token in tokens:
        piece = vocabulary.special_piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
