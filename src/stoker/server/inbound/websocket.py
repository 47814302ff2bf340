"""A WebSocket's protocol: uvicorn's, but that a client which sends too much reads why (SPEC W7).

Imported where the extra `websockets` is installed, by uvicorn.
"""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

log = logging.getLogger(__name__)

LINGER_S = 10.0
"""How long the rest of what a refused client sends is read and dropped."""


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection.

    A socket that is closed while bytes of its client are unread resets the connection, and the client loses
    the close frame. So where frames are refused (1002, 1007, or 1009 for a message over `--max-body-bytes`),
    the close frame and the end of the stream are sent, and what still comes is dropped until the client
    closes.
    """

    def __repr__(self) -> str:
        return f"<WebSocketConnection {'refused' if self.conn.parser_exc else 'open'}>"

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        if self.conn.parser_exc is None:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        """Refuse what came: the application is told that the client has left."""
        sent = self.conn.close_sent
        assert sent is not None, "a failed connection has its close frame"
        log.info("a WebSocket is closed with %d: %s", sent.code, sent.reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})
        self.stop_keepalive()
        self.close_sent = True
        self.close_timer = asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
