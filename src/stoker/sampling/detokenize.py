"""Bytes of tokens to text that is valid UTF-8 at every moment.

A character may be split over several tokens; its bytes wait here until it is whole.
"""

from __future__ import annotations

import codecs


class TextAssembler:
    """Incremental UTF-8 decoder; bytes that can no longer become a character turn into U+FFFD."""

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
