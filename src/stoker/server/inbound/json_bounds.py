"""Bounds on what decoding a JSON body can cost, checked on its bytes while they come in.

A decoder holds the interpreter's lock until it is done and allocates dozens of bytes for a value of two, so a
body is refused before any of it is decoded. Owns the counts; receiving is `bodies`', decoding is `body`'s.
The counts are exact for valid JSON; a malformed body passes as far as it stays within the bounds.
"""

from __future__ import annotations

from stoker.errors import InvalidRequestError, RequestTooLargeError

MAX_VALUES = 2**16
"""Values of a body, those of its lists and objects included: 2,000 turns and 128 tools have some 30,000."""
MAX_DEPTH = 200
"""Lists and objects inside each other."""
MAX_ESCAPES = 2**20
"""Each costs a decoder 8 ns; a million Chinese characters written as `\\uXXXX` have as many."""
MAX_WIDE_BYTES = 4 * 2**20
"""In strings beyond ASCII: one such character makes each of its string take up to four bytes. Over a million
tokens; what is longer, an image or a state, comes in base64, which is ASCII."""
MAX_LAYOUT_BYTES = 4 * 2**20
"""Outside of strings: numbers and white space."""
_SLICE_BYTES = 64 * 1024
"""Looked at without a pause: 0.1 ms, 3 ms where it holds nothing but short strings."""


class JsonBounds:
    """Counts one body.

    Args:
        max_values: values that it may hold.
    """

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._has_begun = False
        self._held = b""  # the first half of an escape whose second half has not come yet
        self._is_inside = False  # a string
        self._is_wide = False  # that string is
        self._num_narrow = 0  # bytes of that string while it is not
        self._num_wide = 0
        self._num_quotes = 0
        self._num_escapes = 0
        self._num_layout = 0
        self._num_values = 1
        self._depth = 0

    def __repr__(self) -> str:
        return f"JsonBounds({self._num_values} values, {self._num_wide} wide bytes)"

    def take(self, part: bytes) -> bytes:
        r"""Count the next bytes of the body.

        Returns:
            What of them is to be decoded: the same JSON, with `\/`, as PHP writes it, made `/`.

        Raises:
            InvalidRequestError: it is no JSON object, or nested too deeply.
            RequestTooLargeError: there is too much of something; details carry the bound.
        """
        slices = range(0, len(part), _SLICE_BYTES)
        return b"".join([self._take(part[start : start + _SLICE_BYTES]) for start in slices])

    def _take(self, part: bytes) -> bytes:
        self._check_begin(part)
        data = self._held + part
        num_last = len(data) - len(data.rstrip(b"\\"))
        self._held = b"\\" * (num_last % 2)
        data = data[: len(data) - len(self._held)]
        if b"\\" not in data:
            self._count(data)
            return data
        if b"\\\\" not in data:
            data = data.replace(b"\\/", b"/")
        self._num_escapes += data.count(b"\\")
        self._bound(self._num_escapes, MAX_ESCAPES, "escapes in strings")
        self._count(data.replace(b"\\\\", b"").replace(b'\\"', b""))
        return data

    def _check_begin(self, part: bytes) -> None:
        if not self._has_begun and (begin := part.lstrip()[:1]):
            self._has_begun = True
            if begin != b"{":
                raise InvalidRequestError("the body is not a JSON object")

    def _count(self, data: bytes) -> None:
        """Count bytes in which every quote begins or ends a string."""
        pieces = data.split(b'"')
        self._count_layout(b"".join(pieces[self._is_inside :: 2]))
        self._num_quotes += len(pieces) - 1
        if self._num_quotes > 4 * self._num_values:  # a value is two strings at most: its key and itself
            raise InvalidRequestError("the body is not valid JSON: strings follow each other")
        self._count_strings(
            pieces[1 - self._is_inside :: 2], may_be_wide=not data.isascii() or rb"\u" in data
        )
        self._is_inside ^= len(pieces) % 2 == 0

    def _count_layout(self, data: bytes) -> None:
        self._num_layout += len(data)
        self._bound(self._num_layout, MAX_LAYOUT_BYTES, "bytes outside of strings")
        num_opened = data.count(b"[") + data.count(b"{")
        if self._depth + num_opened > MAX_DEPTH:
            self._check_depth(data)
        self._depth += num_opened - data.count(b"]") - data.count(b"}")
        self._num_values += num_opened + data.count(b",")
        self._bound(self._num_values, self._max_values, "values")

    def _check_depth(self, data: bytes) -> None:
        depth = self._depth
        for byte in data:
            if byte in b"[{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise InvalidRequestError(
                        f"the body is nested deeper than {MAX_DEPTH} lists and objects", max_depth=MAX_DEPTH
                    )
            elif byte in b"]}":
                depth -= 1

    def _count_strings(self, pieces: list[bytes], *, may_be_wide: bool) -> None:
        """Count what is inside of strings; the first piece may continue one."""
        continues = self._is_inside
        if not may_be_wide and len(pieces) > 2:  # noqa: PLR2004 - what is between the first and the last is whole
            pieces = [pieces[0], pieces[-1]]
        for piece in pieces:
            if not continues:
                self._is_wide, self._num_narrow = False, 0
            continues = False
            self._num_narrow += len(piece)
            self._is_wide |= may_be_wide and not (piece.isascii() and rb"\u" not in piece)
            if self._is_wide:
                self._num_wide += self._num_narrow
                self._num_narrow = 0
        self._bound(self._num_wide, MAX_WIDE_BYTES, "bytes in strings that are not ASCII")

    def _bound(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise RequestTooLargeError(
                f"the body has over {most} {what}; send less in one request", bound=most
            )
