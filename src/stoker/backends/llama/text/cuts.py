"""Where a text is cut before the native tokenizer reads it, for linear time and a bounded stack.

Two kinds of cuts. Before control tokens: the native code walks its list of fragments from the start for each
one it finds, which is quadratic in their number; a piece that begins with one is tokenised as in the whole.
Inside long runs: many byte-pair vocabularies are split into words by std::regex, which recurses once a
character, so that a run of a hundred thousand ends the process. A run is read in pieces of `MAX_RUN_CHARS`,
and only there tokens may differ from those of the whole.

Owns the places of the cuts; the vocabulary tokenises the pieces.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MAX_RUN_CHARS = 4096
"""Characters of a run that are read at once. libstdc++'s std::regex took 314 bytes of stack a character
(x86-64), 512 at the most, and a match holds two runs: 4 MiB of the 16 that preparing threads have."""
_BLOCK_CHARS = 4096  # text in which the native code looks for control tokens at once
_WINDOW_CHARS = 512  # where a block may end
_MAX_TRIES = 8  # occurrences that are looked at in a window
_NICE_CHARS = 256  # how far back a run is cut rather, where a line or a kind of characters ends
_LINE_FEED = 10


class CutKind(IntEnum):
    """What the splitting into words tells apart; ANY may pass for each of them."""

    UNSEEN = 0
    ANY = 1
    LETTER = 2
    NUMBER = 3
    BLANK = 4
    SIGN = 5


Runs = tuple[tuple[CutKind, ...], ...]
"""Kinds of characters that may lie side by side in one word."""
BLANK_RUNS: Runs = ((CutKind.ANY, CutKind.BLANK),)
KIND_RUNS: Runs = tuple(
    (CutKind.ANY, kind) for kind in (CutKind.LETTER, CutKind.NUMBER, CutKind.BLANK, CutKind.SIGN)
)
ALL_RUNS: Runs = (
    (CutKind.ANY, CutKind.LETTER, CutKind.NUMBER, CutKind.SIGN),
    (CutKind.ANY, CutKind.LETTER, CutKind.BLANK),
)
# By `tokenizer.ggml.pre`, as llama-vocab.cpp has it; one that is not here is taken for the worst.
_BY_HAND = (
    "a.x-4.0 chameleon chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1"
    " falcon3 gemma4 gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais"
    " jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kimi-k2 kormo laguna lfm2"
    " llama-bpe llama-v3 llama3 megrez mellum mellum2 midm-2.0 minerva-7b modern-bert mpt olmo phi-2 pixtral"
    " qwen2 qwen35 refact roberta-bpe sarvam-moe smaug-bpe smollm solar-open stablelm2 starcoder trillion"
)
_BY_KIND = (
    "afmoe bailingmoe bailingmoe2 cohere2moe deepseek-coder deepseek-llm deepseek-v3 default falcon gpt-4o"
    " granite-embed-multi-97m hunyuan-dense hy_v4 jais-2 joyai-llm kanana2 llada-moe llama4 minicpm5"
    " minimax-m2 seed-coder spark2_5 superbpe talkie tekken tiny_aya ufakzeka youtu"
)
_RUNS: dict[str, Runs] = dict.fromkeys(_BY_HAND.split(), BLANK_RUNS) | dict.fromkeys(
    _BY_KIND.split(), KIND_RUNS
)
_KINDS = np.zeros(0x110000, np.uint8)  # filled as characters are seen; threads fill in the same
_BY_CATEGORY = {
    "L": CutKind.LETTER,
    "N": CutKind.NUMBER,
    "Z": CutKind.BLANK,
    "P": CutKind.SIGN,
    "S": CutKind.SIGN,
}


def runs_of(pre: str) -> Runs:
    """What may be one word to the splitting of that name (`tokenizer.ggml.pre`)."""
    return _RUNS.get(pre, ALL_RUNS)


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is looked up in a text as it is, before anything else.

    Attributes:
        text: how it is spelled.
        is_control: looked up only where control tokens are read.
        strips_left: it swallows blanks before it.
    """

    text: str
    is_control: bool
    strips_left: bool


class TextCuts:
    """Cuts texts for one vocabulary. Immutable; safe to use from several threads.

    Args:
        specials: the tokens that are looked up in texts as they are.
        runs: what is cut where it is long; empty: nothing.
    """

    def __init__(self, specials: Iterable[Special], runs: Runs) -> None:
        ordered = sorted(specials, key=lambda special: len(special.text), reverse=True)
        self._specials = {
            True: ordered,
            False: [special for special in ordered if not special.is_control],
        }
        self._runs = runs

    def __repr__(self) -> str:
        return f"<TextCuts at {len(self._specials[True])} tokens and in {len(self._runs)} kinds of runs>"

    def pieces(self, text: str, *, parse_special: bool) -> list[str]:
        """`text` in pieces; their tokens, put together, are those of the whole, but in long runs."""
        if len(text) <= MAX_RUN_CHARS:
            return [text]
        specials = self._specials[parse_special]
        places = sorted({*_before_specials(text, specials), *self._in_runs(text, specials)} - {0})
        return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]

    def _in_runs(self, text: str, specials: list[Special]) -> list[int]:
        if not self._runs:
            return []
        codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
        kinds = _kinds(codes)
        found: list[int] = []
        for run in self._runs:
            for begin, end in _long_runs(np.isin(kinds, np.array(run, np.uint8))):
                found += _places_in(codes, kinds, begin, end)
        for begin, end in _long_repetitions(codes):
            found += range(begin + MAX_RUN_CHARS, end, MAX_RUN_CHARS)
        return [_clear_of(text, place, specials) for place in found]


def _kinds(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    kinds = _KINDS[codes]
    if not kinds.all():
        for code in np.unique(codes[kinds == CutKind.UNSEEN]).tolist():
            _KINDS[code] = _kind(chr(code))
        kinds = _KINDS[codes]
    return kinds


def _kind(character: str) -> CutKind:
    if character in "\t\n\v\f\r":
        return CutKind.BLANK
    return _BY_CATEGORY.get(unicodedata.category(character)[0], CutKind.ANY)  # marks, controls, unknown ones


def _long_runs(belongs: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of each stretch of more than `MAX_RUN_CHARS` that belongs."""
    edges = np.flatnonzero(np.diff(belongs, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2]
    is_long = ends - begins > MAX_RUN_CHARS
    return list(zip(begins[is_long].tolist(), ends[is_long].tolist(), strict=True))


def _long_repetitions(codes: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """The same of one character over and over: cut alike, its pieces are tokenised once."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1, [len(codes)]))
    lengths = np.diff(edges)
    is_long = lengths > MAX_RUN_CHARS
    return list(zip(edges[:-1][is_long].tolist(), edges[1:][is_long].tolist(), strict=True))


def _places_in(
    codes: npt.NDArray[np.uint32], kinds: npt.NDArray[np.uint8], begin: int, end: int
) -> list[int]:
    """Where a run is cut: after `MAX_RUN_CHARS`, or a little before, after a line or a kind of characters."""
    found: list[int] = []
    while end - begin > MAX_RUN_CHARS:
        last = begin + MAX_RUN_CHARS
        near = slice(last - _NICE_CHARS, last)
        is_nice = (kinds[near] != kinds[last - _NICE_CHARS + 1 : last + 1]) | (codes[near] == _LINE_FEED)
        nice = np.flatnonzero(is_nice)
        begin = last - _NICE_CHARS + int(nice[-1]) + 1 if len(nice) else last
        found.append(begin)
    return found


def _clear_of(text: str, place: int, specials: list[Special]) -> int:
    """`place`, or the begin of the token that would be cut in two there."""
    for special in specials:
        size = len(special.text)
        at = text.find(special.text, max(0, place - size + 1), place + size - 1)
        if at >= 0:
            return at
    return place


def _before_specials(text: str, specials: list[Special]) -> list[int]:
    """One place in each block at which a token begins that is sure to be found there."""
    found: list[int] = []
    at = _BLOCK_CHARS
    while at < len(text):
        place = _special_in(text, at, specials)
        if place is None:
            at += _WINDOW_CHARS
        else:
            found.append(place)
            at = place + _BLOCK_CHARS
    return found


def _special_in(text: str, begin: int, specials: list[Special]) -> int | None:
    end = min(len(text), begin + _WINDOW_CHARS)
    for special in specials:
        if special.strips_left or special.text != special.text.strip():  # blanks may be swallowed by others
            continue
        at = text.find(special.text, begin, end)
        for _ in range(_MAX_TRIES):
            if at < 0:
                break
            if _is_alone(text, at, special, specials):
                return at
            at = text.find(special.text, at + 1, end)
    return None


def _is_alone(text: str, at: int, special: Special, specials: list[Special]) -> bool:
    """Whether no other token overlaps the one at `at`, except shorter ones that lie within it."""
    end = at + len(special.text)
    for other in specials:
        size = len(other.text)
        start = text.find(other.text, max(0, at - size + 1), end + size - 1)
        while start >= 0:
            is_itself = other is special and start == at
            is_inside = size < len(special.text) and at <= start and start + size <= end
            if not (is_itself or is_inside):
                return False
            start = text.find(other.text, start + 1, end + size - 1)
    return True
