"""Bytes of tokens to text that is valid UTF-8 at every moment, and the stop strings in it (SPEC D3)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Incremental UTF-8 decoder: holds the bytes of a character until it is whole.

    Bytes that can no longer become a character turn into U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __repr__(self) -> str:
        return f"TextAssembler(held={self._decoder.getstate()[0]!r})"

    def push(self, piece: bytes) -> str:
        """The characters that `piece` completes."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD if a character is incomplete, else nothing; the assembler is empty afterwards."""
        return self._decoder.decode(b"", final=True)


class StopGate:
    """Lets text through up to a stop string and holds back only what may still become one.

    The text is read character by character, however it was cut into pieces: the first stop string to be
    complete ends it; of several complete at one character the one that began first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def __repr__(self) -> str:
        return f"StopGate(stops={self._stops!r}, held={self._held!r})"

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            The text that is safe to deliver, and the stop string that was found. Text from that string on
            is dropped.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            start, stop = match
            return buffer[:start], stop
        cut = len(buffer) - self._held_length(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The held text, when nothing can follow any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(buffer.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
