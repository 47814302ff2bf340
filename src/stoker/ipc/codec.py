"""Frames between client and engine process: a 4-byte little-endian length, then msgpack.

Owns the encoding and its bound. Does no I/O: the socket belongs to `stoker.client.process.transport` on one
side and to `stoker.engine.process` on the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from stoker.errors import EngineError
from stoker.ipc.commands import Command
from stoker.ipc.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024**2
"""Far over the largest honest frame (prompt logprobs of a full context are some 60 MiB)."""

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(list[Event])
"""Of all connections: making one takes as long as reading some eighty frames."""


class WireError(EngineError):
    """A frame is over its bound or cannot be decoded; details carry `size_bytes` and `max_bytes`."""

    code = "wire_error"


def encode_command(command: Command) -> bytes:
    """One command as a frame.

    Raises:
        WireError: it is larger than MAX_FRAME_BYTES.
    """
    return _frame(_encoder.encode(command))


def encode_events(events: Sequence[Event]) -> bytes:
    """The events of one turn as a frame.

    Raises:
        WireError: they are larger than MAX_FRAME_BYTES.
    """
    return _frame(_encoder.encode(events))


def _frame(body: bytes) -> bytes:
    size_bytes = len(body)
    if size_bytes > MAX_FRAME_BYTES:
        raise _too_large(size_bytes)
    return size_bytes.to_bytes(HEADER_BYTES, "little") + body


def _too_large(size_bytes: int) -> WireError:
    return WireError(
        f"a frame of {size_bytes} bytes is over the bound of {MAX_FRAME_BYTES}",
        size_bytes=size_bytes,
        max_bytes=MAX_FRAME_BYTES,
    )


class FrameDecoder(Generic[T]):
    """Turns bytes as they arrive into whole messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._pending = bytearray()

    def __repr__(self) -> str:
        return f"<FrameDecoder pending={len(self._pending)}>"

    def feed(self, data: bytes) -> Iterable[T]:
        """The messages that `data` completes; the rest is kept for the next call.

        Raises:
            WireError: a length is over the bound or a body is not such a message; here or while iterating.
        """
        size_bytes = len(data) - HEADER_BYTES
        is_whole = int.from_bytes(data[:HEADER_BYTES], "little") == size_bytes <= MAX_FRAME_BYTES
        if is_whole and not self._pending:  # as a rule: a step's events come at once
            return (self._decoded(memoryview(data)[HEADER_BYTES:]),)
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[T]:
        self._pending += data
        while (body := self._take()) is not None:
            yield self._decoded(body)

    def _decoded(self, body: bytes | memoryview) -> T:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a frame of {len(body)} bytes cannot be read: {error}") from error

    def _take(self) -> bytes | None:
        if len(self._pending) < HEADER_BYTES:
            return None
        size_bytes = int.from_bytes(self._pending[:HEADER_BYTES], "little")
        if size_bytes > MAX_FRAME_BYTES:
            raise _too_large(size_bytes)
        end = HEADER_BYTES + size_bytes
        if len(self._pending) < end:
            return None
        body = bytes(memoryview(self._pending)[HEADER_BYTES:end])
        del self._pending[:end]
        return body


def command_decoder() -> FrameDecoder[Command]:
    """Decoder of what the engine process receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(Command))


def event_decoder() -> FrameDecoder[list[Event]]:
    """Decoder of what the client receives."""
    return FrameDecoder(_event_decoder)
