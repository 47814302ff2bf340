"""The writing side of a connection: one system call for all that a turn of the event loop writes to it.

A call takes longer than making what it sends. An answer begins with its headers and its first text, and ends
with its last text, the usage and the end mark; where the loop is behind, many tokens of a stream wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_GATHERED_BYTES = 64 * 1024
"""More is written at once, so that the transport can ask for a pause."""


class GatheredWrites(asyncio.Transport):
    """A transport that writes with the loop's next turn; in all else the one that it is around.

    Args:
        transport: of the connection.
        loop: that it runs on.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._gathered: list[bytes] = []
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<GatheredWrites {self._num_bytes} bytes, {self._transport!r}>"

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes in order, soon."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes >= MAX_GATHERED_BYTES:
            self._flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send several."""
        for data in list_of_data:
            self.write(data)

    def _flush(self) -> None:
        gathered, self._gathered, self._num_bytes = self._gathered, [], 0
        if gathered and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))

    def write_eof(self) -> None:
        """Send what was written, and the end."""
        self._flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """As the transport."""
        return self._transport.can_write_eof()

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what was written is dropped."""
        self._gathered.clear()
        self._transport.abort()

    def end(self) -> None:
        """Close; at once where the client does not read what was sent before."""
        self._flush()
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        """As the transport."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the client has not taken, those that are not sent yet included."""
        return self._num_bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport."""
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        """As the transport."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """As the transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As the transport."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As the transport."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As the transport."""
        return self._transport.get_protocol()
