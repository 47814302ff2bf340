"""Which tokens end a generation: those that the folder names, and those that are spelled like an end.

Spellings are those that llama.cpp knows, so that a model ends alike on either engine. Apart because it is a
table that grows with the families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import AddedToken

    from stoker.models.folders.texts import FolderTexts

_TURNS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
_FILES = frozenset(  # a model that begins another file has ended this one
    {
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>"),
        *("<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
_PART, _WHOLE = "<|end|>", ("<|return|>", "<|call|>")
"""The first ends only a part of a turn where the others are tokens too."""


def ends_of(texts: FolderTexts, ids: Mapping[str, int], added: Mapping[int, AddedToken]) -> tuple[int, ...]:
    """Ids in ascending order; those that the folder names may have no token.

    Args:
        texts: what the folder says.
        ids: of all tokens, by their spelling.
        added: those that are found in a text before anything else, by id.
    """
    found = set(texts.eos_tokens)
    if texts.eos_text in ids:
        found.add(ids[texts.eos_text])
    spelled = {str(token.content): number for number, token in added.items()}
    found |= {number for text, number in spelled.items() if text in _TURNS | _FILES}
    if all(text in spelled for text in (_PART, *_WHOLE)) and spelled[_PART] not in texts.eos_tokens:
        found.discard(spelled[_PART])
    return tuple(sorted(found))
