"""Server-sent events: bytes in, payloads out. Owns the line buffering; knows nothing of HTTP or JSON."""

from __future__ import annotations

DONE = b"[DONE]"


class SseDecoder:
    """Splits a byte stream into the payloads of its `data:` fields, whatever the chunk borders are.

    Comments, empty events and other fields are dropped. Lines of one event are joined by a newline, as the
    format asks. Line ends may be LF or CRLF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that `data` completes, in order."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        payloads = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._lines.append(text[5:].removeprefix(b" "))
            elif not text and self._lines:
                payloads.append(b"\n".join(self._lines))
                self._lines.clear()
        return payloads
