"""Logprobs as the two OpenAI routes show them (SPEC D6).

Chat has one object a token; the older completions route has four parallel lists, which evaluation harnesses
read: the chosen token is always among its alternatives, and keys are the same text as in `tokens`.
"""

from __future__ import annotations

import codecs
import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker.ipc.usage import TokenLogprob

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


class TopEntry(msgspec.Struct, frozen=True):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct, frozen=True):
    """One chat token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopEntry]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenEntry]
    refusal: None = None


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The chat form; bytes that are no text of their own show as U+FFFD and stand in `bytes`."""
    content = [
        TokenEntry(
            token=entry.token_bytes.decode("utf-8", "replace"),
            logprob=_finite(entry.logprob),
            bytes=list(entry.token_bytes),
            top_logprobs=[
                TopEntry(token=raw.decode("utf-8", "replace"), logprob=_finite(value), bytes=list(raw))
                for _, raw, value in entry.top
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content)


class TextLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextLogprobsWriter:
    """Writes the parallel lists of one choice, over all its chunks.

    `text_offset` counts characters of the text before the token; a character split over tokens counts with
    the token that completes it.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(
        self, entries: Sequence[TokenLogprob], into: TextLogprobs | None = None, hidden_bytes: int = 0
    ) -> TextLogprobs:
        """Append `entries` to `into`, or to new lists.

        Args:
            entries: the tokens, in order.
            into: lists to append to; None: new ones.
            hidden_bytes: of the first tokens, that the text does not show (an opening special token).
        """
        lists = into or TextLogprobs([], [], [], [])
        for entry in entries:
            shown = entry.token_bytes[hidden_bytes:]
            hidden_bytes = max(0, hidden_bytes - len(entry.token_bytes))
            token = _token_name(entry.token_bytes)
            lists.tokens.append(token)
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(shown))
            lists.token_logprobs.append(None if entry.logprob is None else _finite(entry.logprob))
            lists.top_logprobs.append(_alternatives(token, entry))
        return lists

    def write_prompt(self, entries: Sequence[TokenLogprob], text: str) -> TextLogprobs:
        """Begin with the prompt's entries; `text` is what was echoed of it."""
        num_bytes = sum(len(entry.token_bytes) for entry in entries)
        return self.write(entries, hidden_bytes=max(0, num_bytes - len(text.encode())))


def _alternatives(token: str, entry: TokenLogprob) -> dict[str, float] | None:
    """The alternatives by name, the chosen token among them; None for a first token, which has none."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for _, raw, value in entry.top:
        top.setdefault(_token_name(raw), _finite(value))
    top.setdefault(token, _finite(entry.logprob))
    return top


def _token_name(raw: bytes) -> str:
    """The token's text, or OpenAI's `bytes:` and hexadecimal for bytes that are no text of their own."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
