"""The head of a tokenizer of MNN's: its form, and which tokens are control tokens, ends and prefixes.

Both forms, tokenizer.txt and tokenizer.mtok, begin with the same three lines of numbers. What follows is
MNN's to read; of the text form the number of tokens stands in the fourth line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from stoker.models.folders.json_file import MAX_TOKENIZER_BYTES, broken, regular_size
from stoker.wording import size_text

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.errors import ModelFileError

_MAGIC = 430
_MAX_LINE_BYTES = 1 << 20
_MAX_TOKENS = 1 << 22
_NUM_COUNTS = 3


class TokenizerForm(IntEnum):
    """How texts are cut into tokens, by the number in the file."""

    SENTENCEPIECE = 0
    TIKTOKEN = 1
    BERT = 2
    HUGGINGFACE = 3
    PIPELINE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerHead:
    """What a tokenizer says of itself.

    Attributes:
        form: how it works.
        n_vocab: tokens; 0: the form does not say.
        specials: control tokens.
        ends: tokens that end a generation.
        prefix: tokens that MNN puts before every text.
        keeps_bytes: no byte of a text is changed or dropped before it is cut into tokens, as far as is known.
    """

    form: TokenizerForm
    n_vocab: int
    specials: tuple[int, ...]
    ends: tuple[int, ...]
    prefix: tuple[int, ...]
    keeps_bytes: bool


def read_head(path: Path) -> TokenizerHead:
    """The head of the tokenizer at `path`. Raises ModelFileError where it is none, or damaged."""
    size = regular_size(path)
    if size > MAX_TOKENIZER_BYTES:
        text = f"it has {size_text(size)}, at most {size_text(MAX_TOKENIZER_BYTES)} are taken"
        raise broken(path, text)
    with path.open("rb") as file:
        lines = [file.readline(_MAX_LINE_BYTES) for _ in range(3)]
        body = file.readline(_MAX_LINE_BYTES)
    magic, kind = _numbers(path, lines[0], 2)
    if magic != _MAGIC or kind not in set(TokenizerForm):
        raise broken(path, f"it begins with {magic} {kind}: it is no tokenizer of MNN's that is known")
    counts = _numbers(path, lines[1], _NUM_COUNTS)
    tokens = _numbers(path, lines[2], sum(counts))
    num_special, num_ends, _ = counts
    form = TokenizerForm(kind)
    n_vocab = 0 if form is TokenizerForm.PIPELINE else _numbers(path, body, 1)[0]
    if form is not TokenizerForm.PIPELINE and not max(tokens, default=0) < n_vocab:
        raise broken(path, f"it has {n_vocab} tokens and names token {max(tokens)}")
    return TokenizerHead(
        form=form,
        n_vocab=n_vocab,
        specials=tuple(tokens[:num_special]),
        ends=tuple(dict.fromkeys(tokens[num_special : num_special + num_ends])),
        prefix=tuple(tokens[num_special + num_ends :]),
        keeps_bytes=_keeps_bytes(form, body),
    )


def _keeps_bytes(form: TokenizerForm, body: bytes) -> bool:
    """Word pieces drop blanks and lower letters; of a pipeline the first byte says whether it normalises."""
    return form is not TokenizerForm.BERT and (form is not TokenizerForm.PIPELINE or body[:1] == b"\0")


def _numbers(path: Path, line: bytes, count: int) -> list[int]:
    """That many whole numbers, at the beginning of a line."""
    words = line.split()[:count]
    if len(words) < count or not all(word.isdigit() and len(word) < 10 for word in words):  # noqa: PLR2004
        raise _damaged(path, f"{count} whole numbers are missing at the beginning of a line")
    values = [int(word) for word in words]
    if any(value > _MAX_TOKENS for value in values):
        raise _damaged(path, f"it names {max(values)}, at most {_MAX_TOKENS} tokens are taken")
    return values


def _damaged(path: Path, reason: str) -> ModelFileError:
    return broken(path, f"it is no tokenizer of MNN's, or damaged: {reason}")
