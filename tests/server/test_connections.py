"""Connections that ask for nothing, for too long or for too much cost nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys

import httpx
import pytest
from stand_in import HOLD, delta

from stoker.server.inbound import connections
from stoker.server.inbound.connections import GatheredWrites

BOUND = 16
WORK = b'{"prompt": "a", "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def small(start_server):
    """A server of 16 connections."""
    server = start_server(max_connections=BOUND)
    server.ready.result(60)
    return server


def connected(stack, server):
    """A connection that is closed with the stack."""
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))


def all_of(connection):
    """Everything until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def error_of(answer):
    """(status, code) of an answer that closes its connection."""
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def working(stack, server, count):
    """Connections with a request at work on each."""
    found = []
    for _ in range(count):
        server.call(lambda: server.runtime.scripts.append([delta("x"), HOLD]))
        connection = connected(stack, server)
        connection.sendall(HEAD % len(WORK) + WORK)
        assert b" 200 " in connection.recv(4096)
        found.append(connection)
    return found


def test_idle_connections_give_way_to_new_ones(small):
    """S4: the longest idle first; a hundred of them keep nobody from being answered."""
    with contextlib.ExitStack() as stack:
        idle = [connected(stack, small) for _ in range(100)]
        for _ in range(3):
            assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        assert all(all_of(connection) == b"" for connection in idle[: 100 - BOUND])
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in all_of(idle[-1])


WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [b"GET /hea", HEAD % 1000, HEAD % 1000 + b'{"prompt":', WHOLE + HEAD % 1000 + b'{"prompt":'],
    ids=["head", "body", "part", "ahead"],
)
def test_unfinished_requests_give_way_too(small, begun):
    """S4: as many as there may be connections."""
    with contextlib.ExitStack() as stack:
        for _ in range(3 * BOUND):
            connected(stack, small).sendall(begun)
        assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200


def test_requests_at_work_do_not_give_way(small):
    """S4: where all connections are at work a new one gets a 503 that says how many there may be."""
    with contextlib.ExitStack() as stack:
        running = working(stack, small, BOUND)
        late = connected(stack, small)
        late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = all_of(late)
        assert error_of(answer) == (503, "server_busy")
        assert b"retry-after: 2\r\n" in answer
        assert b"all 16 connections" in answer
        small.call(small.runtime.release)
        assert all(b"[DONE]" in answer for answer in map(_until_done, running))
        assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200


def test_refused_connections_make_no_room(small):
    """S4: however many come while all are at work, none of them is served: the bound holds."""
    with contextlib.ExitStack() as stack:
        running = working(stack, small, BOUND)
        late = [connected(stack, small) for _ in range(2 * connections.MAX_REFUSED)]
        for connection in late:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = [all_of(connection) for connection in late]
        assert not any(b" 200 " in answer for answer in answers)
        assert error_of(answers[-1]) == (503, "server_busy")
        small.call(small.runtime.release)
        assert all(b"[DONE]" in answer for answer in map(_until_done, running))


def test_a_request_that_was_sent_ahead_does_not_give_way(small):
    """S4: once it is at work, though the one before it on its connection is answered."""
    with contextlib.ExitStack() as stack:
        small.call(lambda: small.runtime.scripts.append([delta("x"), HOLD]))
        ahead = connected(stack, small)
        ahead.sendall(WHOLE + HEAD % len(WORK) + WORK)
        _until(ahead, b'"x"')
        for _ in range(3 * BOUND):
            connected(stack, small)
        assert httpx.get(f"{small.url}/health", timeout=60).status_code == 200
        small.call(small.runtime.release)
        _until_done(ahead)


def test_a_head_behind_a_long_body_counts_for_itself(scripted):
    """S4: where the bound on a head falls into the next request of one burst, nothing is over it."""
    body = b'{"content": "%b"}' % (b"a" * (connections.MAX_HEAD_BYTES - 200))
    first = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    fill = connections.MAX_HEAD_BYTES - len(first)
    assert 0 < fill < 200
    second = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: %b\r\nConnection: close\r\n\r\n" % (b"b" * 300)
    with contextlib.ExitStack() as stack:
        connection = connected(stack, scripted)
        connection.sendall(first + second)
        assert all_of(connection).count(b"HTTP/1.1 200 OK") == 2


def _until_done(connection):
    return _until(connection, b"[DONE]")


def _until(connection, end):
    data = b""
    while end not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", None), (b"GET /health HTTP/1.1\r\nHost: loc", 408), (b"\r\n", 408)]
)
def test_a_head_has_to_come_in_time(start_server, sent, status):
    """S4: a connection without a byte is closed; an unfinished head is a 408."""
    server = start_server(receive_timeout_s=0.2)
    with contextlib.ExitStack() as stack:
        connection = connected(stack, server)
        connection.sendall(sent)
        answer = all_of(connection)
    assert answer == b"" if status is None else error_of(answer) == (status, "request_timeout")


def test_a_head_has_to_come_in_time_on_a_kept_connection_too(start_server):
    """S4: between two requests likewise."""
    server = start_server(receive_timeout_s=0.2)
    with contextlib.ExitStack() as stack:
        connection = connected(stack, server)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert error_of(all_of(connection)) == (408, "request_timeout")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"b" * 1_000_000,
    ],
    ids=["path", "headers", "value"],
)
def test_a_head_is_bounded(scripted, sent):
    """S4: 431, whether it would end or not."""
    with contextlib.ExitStack() as stack:
        connection = connected(stack, scripted)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(sent)
        assert error_of(all_of(connection)) == (431, "request_too_large")


def test_trailers_are_bounded(scripted):
    """S4: what stands behind a chunked body is no way around it."""
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with contextlib.ExitStack() as stack:
        connection = connected(stack, scripted)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(chunked + b"X-A: b\r\n" * 50_000)
        assert b" 200 " not in all_of(connection)


def test_requests_ahead_are_bounded(scripted):
    """S4: a few may be sent before the first is answered; thousands close the connection."""
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        few = connected(stack, scripted)
        few.sendall(one * 4 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert all_of(few).count(b" 200 OK") == 5
        many = connected(stack, scripted)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            many.sendall(one * 4000)
        assert all_of(many).count(b" 200 OK") < 100
    assert httpx.get(f"{scripted.url}/health", timeout=60).status_code == 200


def test_malformed_requests_are_logged_now_and_then(scripted, caplog):
    """S4: one line, not one a request, with how many there were."""
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        for number in range(50):
            connection = connected(stack, scripted)
            connection.sendall(b"\x00\xff nonsense %d\r\n\r\n" % number)
            assert error_of(all_of(connection)) == (400, "invalid_request")
    assert len(caplog.records) <= 1


def test_the_number_of_malformed_requests_is_told(caplog, monkeypatch):
    """S4: with the first one at once, the others once a minute has passed."""
    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    found = connections.Connections(BOUND, 1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            found.note_malformed()
        now[0] += 61
        found.note_malformed()
    assert [record.args for record in caplog.records] == [(1,), (10,)]


def test_a_client_that_does_not_read_is_given_up(scripted, until, monkeypatch):
    """S4: its stream ends, and what it did not read is not kept for it; memory stays bounded till then."""
    monkeypatch.setattr(connections, "STALLED_S", 0.1)
    text = "x" * 100_000
    scripted.call(lambda: scripted.runtime.scripts.append([*[delta(text)] * 200, HOLD]))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", scripted.port))
        connection.sendall(HEAD % len(WORK) + WORK)
        until(lambda: bool(scripted.runtime.abandoned))
    until(lambda: scripted.call(lambda: not scripted.runtime.live))


async def test_a_slow_reader_is_not_given_up(monkeypatch):
    """S4: fewer bytes wait than did: it reads."""
    sizes = iter([500, 400, 400])

    class Transport(asyncio.Transport):
        closed = False

        def get_write_buffer_size(self):
            return next(sizes, 0)

        def abort(self):
            self.closed = True

        close = abort

    found = connections.Connection.__new__(connections.Connection)
    loop, transport = asyncio.get_running_loop(), Transport()
    found.loop, found._stall = loop, None
    found.transport = found._writes = GatheredWrites(transport, loop)
    monkeypatch.setattr(connections, "STALLED_S", 0.0)
    found._watch_stall(1000)
    for closed in (False, False, True):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert transport.closed or not closed


def test_the_reserve_is_kept(monkeypatch):
    """S4: the limit of descriptors, less what the engine's start needs, bounds the connections."""
    monkeypatch.setattr(connections, "descriptor_limit", lambda: 1024)
    assert connections.connections_within(1024) == 1024 - connections.RESERVED
    assert connections.connections_within(100) == 100
    monkeypatch.setattr(connections, "descriptor_limit", lambda: 64)
    assert connections.connections_within(1024) == 16


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit on Windows")
@pytest.mark.parametrize(("soft", "hard", "after"), [(256, 4096, 1152), (256, 512, 512), (2048, 4096, 2048)])
def test_the_soft_limit_is_raised_as_far_as_it_goes(soft, hard, after):
    """S4: no further than is needed, and never lowered."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from stoker.server.inbound import connections\n"
        "connections.raise_limit(1024)\n"
        "print(connections.descriptor_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(after)
