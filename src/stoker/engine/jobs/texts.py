"""A prompt's text as tokens: which special tokens are added to it.

A completion's text gets what the vocabulary adds. A chat template writes the special tokens itself, but not
every template writes the BOS that its model was trained with; llama-server adds it, and so does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Vocabulary


def text_tokens(text: str, vocabulary: Vocabulary, *, is_chat: bool, has_state: bool = False) -> list[int]:
    """Token ids of a prompt's text.

    Args:
        text: the prompt.
        vocabulary: of the model.
        is_chat: a chat template wrote it. It gets the BOS that the vocabulary adds to every text, unless it
            begins with that already, and no EOS.
        has_state: the model begins from a given state; a conversation goes on there, without a BOS.
    """
    tokens = vocabulary.tokenize(text, add_special=not is_chat, parse_special=True)
    bos = vocabulary.added_bos
    if is_chat and not has_state and bos is not None and tokens[:1] != [bos]:
        return [bos, *tokens]
    return tokens
