"""What one turn of the event loop writes to a connection leaves in one piece."""

from __future__ import annotations

import asyncio
from typing import Any

from stoker.server.inbound.connections import MAX_GATHERED_BYTES, GatheredWrites


class Recorder(asyncio.Transport):
    """Keeps every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.closes = False
        self.num_unread = 7

    def write(self, data: Any) -> None:
        """Keep it."""
        self.calls.append(bytes(data))

    def write_eof(self) -> None:
        """Keep it."""
        self.calls.append("eof")

    def close(self) -> None:
        """Keep it."""
        self.calls.append("close")
        self.closes = True

    def abort(self) -> None:
        """Keep it."""
        self.calls.append("abort")
        self.closes = True

    def is_closing(self) -> bool:
        """As the test says."""
        return self.closes

    def get_write_buffer_size(self) -> int:
        """As the test says."""
        return self.num_unread


def gathered() -> tuple[Recorder, GatheredWrites]:
    """A recorder, and what is around it."""
    recorder = Recorder()
    return recorder, GatheredWrites(recorder, asyncio.get_running_loop())


async def test_what_a_turn_writes_leaves_with_the_next_in_one_piece() -> None:
    """S11: in order; a later turn's is a piece of its own."""
    recorder, writes = gathered()
    writes.write(b"head")
    writes.writelines([b" and", b" body"])
    assert recorder.calls == []
    await asyncio.sleep(0)
    writes.write(b"more")
    await asyncio.sleep(0)
    assert recorder.calls == [b"head and body", b"more"]


async def test_an_end_comes_after_what_was_written() -> None:
    """S11: half-closed or closed in the same turn, no byte is lost."""
    for end, name in ((GatheredWrites.write_eof, "eof"), (GatheredWrites.close, "close")):
        recorder, writes = gathered()
        writes.write(b"last")
        end(writes)
        await asyncio.sleep(0)
        assert recorder.calls == [b"last", name]


async def test_a_client_that_reads_gets_the_last_bytes_of_a_connection_that_is_ended() -> None:
    """S4, S11: one that does not is not waited for."""
    for num_unread, end in ((0, "close"), (7, "abort")):
        recorder, writes = gathered()
        recorder.num_unread = num_unread
        writes.write(b"last")
        writes.end()
        await asyncio.sleep(0)
        assert recorder.calls == [b"last", end]


async def test_nothing_is_written_to_a_connection_that_has_gone() -> None:
    """S11: by an abort of ours, or by the client between two turns."""
    recorder, writes = gathered()
    writes.write(b"lost")
    writes.abort()
    await asyncio.sleep(0)
    assert recorder.calls == ["abort"]
    recorder, writes = gathered()
    writes.write(b"lost")
    recorder.closes = True
    await asyncio.sleep(0)
    assert recorder.calls == []


async def test_much_is_written_at_once_and_what_waits_is_counted() -> None:
    """S11: the transport asks for a pause by what it holds; a stalled client is found by all that waits."""
    recorder, writes = gathered()
    writes.write(b"ab")
    assert writes.get_write_buffer_size() == 7 + 2
    writes.write(bytes(MAX_GATHERED_BYTES))
    assert [len(call) for call in recorder.calls] == [MAX_GATHERED_BYTES + 2]
    assert writes.get_write_buffer_size() == 7
