"""What tells vocabularies apart: machines go on with each other's tokens only where ids mean the same.

Apart because both kinds of runners ask for it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Vocabulary

SAMPLED = 4096
"""Tokens that are looked at, evenly spaced: some milliseconds at a load."""
_DIGEST_BYTES = 8


def vocabulary_sample(vocabulary: Vocabulary, num_vocab: int) -> str:
    """16 hexadecimal digits, equal where the ids mean the same texts and the same ones end an answer.

    All tokens of a small vocabulary count, of a larger one `SAMPLED` of them.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"stoker-vocab")
    digest.update(repr((num_vocab, sorted(vocabulary.eog_tokens))).encode())
    for token in range(0, num_vocab, max(1, num_vocab // SAMPLED)):
        try:
            piece = vocabulary.special_piece(token)
        except InvalidRequestError:  # a row of logits that stands for no token
            piece = b""
        digest.update(len(piece).to_bytes(4, "little"))
        digest.update(piece)
    return digest.hexdigest()
