"""Request bodies on their way in: bounded one by one, over all connections, and in time (SPEC S4).

Owns the bytes from the first one until they are decoded, the thread in which large bodies are decoded, and
the watch on clients that leave before their answer (SPEC S5). What a body says is `body`'s; the head of a
request is `connections`'.

`JsonBounds` bounds what decoding a JSON body can cost, on its bytes while they come in. A decoder holds the
interpreter's lock until it is done and allocates dozens of bytes for a value of two, so a body is refused
before any of it is decoded. The counts are exact for valid JSON; a malformed body passes as far as it stays
within them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect

from stoker.errors import (
    ContentEncodingError,
    InvalidRequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    ServerBusyError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable

    from starlette.types import Receive

    from stoker.settings import ServerSettings


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


T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""A body over these is decoded in a thread; the rest of it counts towards the bound over all bodies."""
MIN_BYTES_S = 16 * 1024
"""A sender that is slower on average is ended: it would hold memory for too long."""
GIVES_WAY_S = 5.0
"""Age from which an unfinished body is given up for one that finds no room; most are whole in a second."""


@dataclass(eq=False)
class _Receipt:
    """What has come of one body.

    Attributes:
        began_at: seconds of the loop's clock.
        num_bytes: received so far; 0 again when they were given up.
        clock: ends the reading.
    """

    began_at: float
    num_bytes: int = 0
    is_whole: bool = False
    gave_way: bool = False
    clock: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    @property
    def num_held(self) -> int:
        """Bytes that count towards the bound over all bodies."""
        return max(0, self.num_bytes - LARGE_BYTES)


class IncomingBodies:
    """The bodies of all connections.

    Args:
        settings: `max_body_bytes`, `max_receiving_bytes` and `receive_timeout_s` bound them.

    Attributes:
        max_body_bytes: of one.
        is_strict: fields that a route does not know are refused.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.is_strict = settings.strict
        self.max_body_bytes = settings.max_body_bytes
        self._max_bytes = max(settings.max_receiving_bytes, settings.max_body_bytes)
        self._pause_s = settings.receive_timeout_s
        self._receipts: dict[_Receipt, None] = {}  # the oldest first
        self._decoder = ThreadPoolExecutor(1, "stoker-bodies")  # one after the other, as each takes memory

    def __repr__(self) -> str:
        return f"IncomingBodies({len(self._receipts)} bodies, {self.num_held} bytes)"

    @property
    def num_held(self) -> int:
        """Bytes of large bodies that are not decoded yet."""
        return sum(receipt.num_held for receipt in self._receipts)

    def check_declared(self, lengths: Iterable[bytes]) -> None:
        """Refuse a body that says it is too long before any of it is sent. Raises RequestTooLargeError."""
        if any(length.isdigit() and int(length[:20]) > self.max_body_bytes for length in lengths):
            raise self._too_large()

    @staticmethod
    def check_encoding(encodings: Iterable[bytes]) -> None:
        """Refuse a body that is compressed: what it unpacks to has no bound. Raises ContentEncodingError."""
        for encoding in encodings:
            if encoding.strip().lower() not in (b"", b"identity"):
                name = encoding.decode("latin-1")[:40]
                raise ContentEncodingError(
                    f"Content-Encoding is {name!r}; bodies are taken uncompressed only"
                )

    @contextlib.asynccontextmanager
    async def received(
        self, receive: Receive, bounds: JsonBounds | None = None
    ) -> AsyncGenerator[bytearray, None]:
        """The bytes of a body when all have come; they count as held until the block ends.

        Args:
            receive: of the request.
            bounds: for JSON, what may be in it; None: any bytes.

        Raises:
            RequestTooLargeError: over the limit, or `bounds` say so.
            RequestTimeoutError: the sender pauses for too long, or is too slow.
            ServerBusyError: bodies of others take all the room there is.
            ClientDisconnect: the client left.
        """
        receipt = _Receipt(asyncio.get_running_loop().time())
        self._receipts[receipt] = None
        try:
            yield await self._read(receipt, receive, bounds)
        finally:
            del self._receipts[receipt]

    async def decoded(self, data: bytearray, work: Callable[[bytearray], T]) -> T:
        """What `work` makes of a body: here, or in the thread where the body is large."""
        if len(data) <= LARGE_BYTES:
            return work(data)
        return await asyncio.get_running_loop().run_in_executor(self._decoder, work, data)

    def close(self) -> None:
        """Decode nothing more. Idempotent."""
        self._decoder.shutdown(wait=False, cancel_futures=True)

    async def _read(self, receipt: _Receipt, receive: Receive, bounds: JsonBounds | None) -> bytearray:
        data = bytearray()
        try:
            async with receipt.clock:
                while not receipt.is_whole:
                    receipt.clock.reschedule(self._deadline(receipt))
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    if receipt.gave_way:  # its task was woken by these bytes before the clock ended it
                        raise self._no_room()
                    part = message.get("body", b"")
                    self._make_room(receipt, len(part))
                    data += part if bounds is None else bounds.take(part)
                    receipt.is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise (self._no_room() if receipt.gave_way else self._too_slow(receipt)) from None
        return data

    def _deadline(self, receipt: _Receipt) -> float:
        by_rate = receipt.began_at + self._pause_s + receipt.num_bytes / MIN_BYTES_S
        return min(asyncio.get_running_loop().time() + self._pause_s, by_rate)

    def _make_room(self, receipt: _Receipt, num_bytes: int) -> None:
        """Count further bytes; where there is no room for them the oldest unfinished body gives way."""
        receipt.num_bytes += num_bytes
        if receipt.num_bytes > self.max_body_bytes:
            raise self._too_large()
        while receipt.num_held and self.num_held > self._max_bytes:
            now_s = asyncio.get_running_loop().time()
            oldest = next(each for each in self._receipts if not each.is_whole and not each.gave_way)
            if oldest is receipt or now_s < oldest.began_at + GIVES_WAY_S:
                raise self._no_room()
            oldest.gave_way, oldest.num_bytes = True, 0
            oldest.clock.reschedule(now_s)

    def _too_large(self) -> RequestTooLargeError:
        text = f"the request body is over {self.max_body_bytes} bytes"
        return RequestTooLargeError(text, max_body_bytes=self.max_body_bytes)

    def _no_room(self) -> ServerBusyError:
        return ServerBusyError(
            f"the bodies of other requests take the {self._max_bytes} bytes that all may take; try later",
            retry_after_s=GIVES_WAY_S,
            max_receiving_bytes=self._max_bytes,
        )

    def _too_slow(self, receipt: _Receipt) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the body ends after {receipt.num_bytes} bytes: a sender may pause for {self._pause_s:g} s"
            f" and has to send {MIN_BYTES_S} bytes a second on average",
            receive_timeout_s=self._pause_s,
        )


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Run `work`; cancel it, and wait for its clean-up, as soon as the client leaves.

    The request's body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    working = _begun(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """A task that has run up to its first wait, where Python can do that (3.12).

    Without it the first request of a crowd is submitted when the last one has been read.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.ensure_future(work)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
