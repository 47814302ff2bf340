"""What a program sees of a server that is not there, is none, falls silent or goes away."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx_sse import ServerSentEvent

from stoker import Runtime
from stoker.errors import (
    AuthenticationError,
    InvalidRequestError,
    MachineSetupError,
    NotReadyError,
    ServerLostError,
)
from stoker.ipc.events import Delta
from stoker.ipc.status import EngineHealth
from stoker.remote import connection, wire
from stoker.remote.mirror import ServerMirror
from stoker.remote.runtime import RemoteRuntime


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The URL of something that answers every request with these bytes; empty: it says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline() not in {b"\r\n", b""}:
            pass
        if answer:
            writer.write(answer)
            writer.close()
        else:
            await reader.read()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, with a slow fake, and its URL."""
    with serving(tmp_path) as found:
        yield found


@contextmanager
def serving(tmp_path: Path, port: str = "0") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The same for the block."""
    words = [
        "--model",
        "fake:eog_period=0,step_delay_s=0.02",
        "--port",
        port,
        "--no-follow-sleep",
        "--keepalive-s",
        "0.3",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), **environment()},
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield f"http://127.0.0.1:{ready['port']}", process
        process.send_signal(signal.SIGCONT)
        process.kill()


def environment() -> dict[str, str]:
    """What a program needs to find this one."""
    import os  # noqa: PLC0415

    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}


async def test_where_no_server_listens_the_error_says_what_to_do() -> None:
    """I11: the URL, and how one is started."""
    with pytest.raises(
        ServerLostError, match=r"no server answers at http://127.0.0.1:9 .*`stoker serve`.*STOKER_URL"
    ):
        async with Runtime.connect("http://127.0.0.1:9"):
            pass


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    ],
)
async def test_what_is_no_stoker_is_told_apart(answer: bytes) -> None:
    """I11: another program on the port, or another version."""
    async with answering(answer) as url:
        with pytest.raises(MachineSetupError, match=f"what listens at {url} is no Stoker"):
            await Runtime.connect(url).start()


async def test_what_speaks_no_http_is_told_as_a_lost_server() -> None:
    """I11: never an error of the HTTP library."""
    async with answering(b"SSH-2.0-OpenSSH\r\n") as url:
        with pytest.raises(ServerLostError, match="went away"):
            await Runtime.connect(url).start()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8686",
        "ftp://host",
        "http://",
        "http://user:secret@host",
        "http://[::1",
        "http://host:99999",
        "http://host/?key=secret",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    """I11: and a password in it is not shown."""
    with pytest.raises(InvalidRequestError) as caught:
        Runtime.connect(url)
    assert caught.value.param == "url"
    assert "secret" not in str(caught.value)


def test_url_and_key_come_from_the_environment_and_the_key_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I11: STOKER_URL and STOKER_API_KEY; arguments win."""
    monkeypatch.setenv("STOKER_URL", "http://elsewhere:1")
    monkeypatch.setenv("STOKER_API_KEY", "hidden")
    found = Runtime.connect()
    assert found.url == "http://elsewhere:1"
    assert "hidden" not in repr(found) + repr(vars(found)) + repr(vars(found)["_server"])
    assert {Runtime.connect(f"http://here:2{end}").url for end in ("", "/", "/v1", "/v1/")} == {
        "http://here:2"
    }
    with pytest.raises(InvalidRequestError, match="printable"):
        Runtime.connect(api_key="a\nb")


async def test_a_runtime_that_was_not_entered_says_so() -> None:
    """I11: as an embedded one does."""
    runtime = Runtime.connect("http://127.0.0.1:9")
    assert (runtime.is_ready, runtime.models, runtime.health().state) == (False, [], "closed")
    for question in (lambda: runtime.resolve(None), lambda: asyncio.run(runtime.status())):
        with pytest.raises(NotReadyError, match="async with"):
            await asyncio.to_thread(question)


async def test_a_server_that_dies_during_an_answer_is_told_at_once(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    """I11: how many tokens had come, and that the request is not kept."""
    url, process = server

    async def asked(runtime: RemoteRuntime) -> None:
        async for _ in runtime.generate("hello", max_tokens=400):
            process.kill()

    async with Runtime.connect(url) as runtime:
        with pytest.raises(
            ServerLostError, match=r"went away.*ask again.*tokens of the answer had come"
        ) as caught:
            await asked(runtime)
        assert caught.value.details["num_tokens"] >= 1
        assert caught.value.details["url"] == url
        with pytest.raises(ServerLostError):
            await runtime.tokenize("x")
        async with asyncio.timeout(10):
            while "no server answers" not in runtime.health().reason:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        assert (runtime.is_ready, runtime.health().state) == (False, "failing")


class OtherVersion(connection.ServerConnection):
    """A server whose stream of events begins with one that this version does not know."""

    def __init__(self, event: str) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self._event = event

    async def get(self, path: str, kind: type[Any]) -> Any:
        """That all is well."""
        health = EngineHealth(state="serving")
        return wire.Overview(is_ready=True, is_suspended=False, health=health, models=[], states=[])

    async def stream(self, *args: Any, **how: Any) -> AsyncGenerator[ServerSentEvent, None]:
        """The event, and then nothing."""
        yield ServerSentEvent(data=self._event)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "event", ['{"event": "engine"}', '{"event": "model", "at": 1.0, "name": "m"}', '{"at": 1.0}', "[]"]
)
async def test_an_event_of_another_version_is_told_by_health(event: str) -> None:
    """I11: what follows the server goes on, so its models are never those of long ago without a word."""
    mirror = ServerMirror(OtherVersion(event), lambda state: None)
    await mirror.start()
    async with asyncio.timeout(5):
        while mirror.health().state != "failing":  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert "is no Stoker, or one of another version: " in mirror.health().reason
    assert not mirror.is_ready
    await mirror.refresh()
    assert mirror.is_ready
    await mirror.close()


@pytest.mark.long
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_server_that_falls_silent_is_found(
    server: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    """I11: a stream by the missing comments, a call without one by /health."""
    url, process = server
    quiet = connection.httpx.Timeout(None, connect=1.0, read=1.0)
    monkeypatch.setattr(connection, "_STREAM", quiet)
    monkeypatch.setattr(connection, "_SHORT", quiet)
    monkeypatch.setattr(connection, "PING_S", 0.2)

    async def asked(runtime: RemoteRuntime) -> None:
        if is_stream:
            async for _ in runtime.generate("hello", max_tokens=400):
                process.send_signal(signal.SIGSTOP)
        else:
            process.send_signal(signal.SIGSTOP)
            await runtime.choose("hello", ["a", "b"])

    async with Runtime.connect(url) as runtime:
        with pytest.raises(ServerLostError, match="does not answer any more"):
            await asked(runtime)
        process.send_signal(signal.SIGCONT)


@pytest.mark.long
async def test_a_stream_with_nothing_to_say_lives_by_its_comments(
    server: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: a paused request says nothing for longer than a silent server may."""
    monkeypatch.setattr(connection, "_STREAM", connection.httpx.Timeout(None, read=0.1))
    async with Runtime.connect(server[0]) as runtime:
        with pytest.raises(ServerLostError):  # the beat of this server is slower
            await _paused(runtime)
    monkeypatch.setattr(connection, "_STREAM", connection.httpx.Timeout(None, read=connection.QUIET_S))
    async with Runtime.connect(server[0]) as runtime:
        assert await _paused(runtime) == 20


async def _paused(runtime: RemoteRuntime) -> int:
    """Tokens of an answer that was paused for longer than the server's beat."""
    from stoker import GenerateRequest  # noqa: PLC0415
    from stoker.ipc.events import Paused  # noqa: PLC0415

    num_tokens = 0
    request = GenerateRequest(prompt="hello", max_tokens=20)
    async with aclosing(runtime.stream(request, "mine")) as events:
        async for event in events:
            if isinstance(event, Delta):
                num_tokens += len(event.token_ids)
                if num_tokens == 1:
                    await runtime.pause_request("mine")
            elif isinstance(event, Paused):
                asyncio.get_running_loop().call_later(
                    0.8, lambda: asyncio.ensure_future(runtime.resume_request("mine"))
                )
    return num_tokens


@pytest.mark.long
async def test_a_suspended_server_that_comes_back_serves_the_same_program_and_keeps_its_request(
    server: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    """I11, L2: the request goes on without its client and is read again by its id."""
    url, process = server
    async with Runtime.connect(url) as runtime:

        async def asked() -> None:
            async with aclosing(runtime.generate("hello", max_tokens=60, request_id="mine")) as deltas:
                await anext(deltas)
                await runtime.suspend(grace_s=0.0)
                process.terminate()
                async for _ in deltas:
                    pass

        with pytest.raises(NotReadyError, match="its next start goes on with this"):
            await asked()
        assert await asyncio.to_thread(process.wait, 60) == 0
        with serving(tmp_path, url.rpartition(":")[2]):
            async with asyncio.timeout(60):
                while not runtime.is_ready:  # noqa: ASYNC110 - the task that follows the server tells nobody
                    await asyncio.sleep(0.05)
            assert [kept.id for kept in runtime.kept()] == ["mine"]
            events = [event async for event in runtime.attach("mine")]
            assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 60


async def test_closing_ends_what_runs_and_says_that_it_was_closed(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    """I11: the server goes on, without this program's requests."""
    runtime = Runtime.connect(server[0])
    await runtime.start()
    deltas = runtime.generate("hello", max_tokens=400)
    await anext(deltas)
    await runtime.close()
    with pytest.raises(NotReadyError, match="not connected"):
        await anext(deltas)
    async with Runtime.connect(server[0]) as other, asyncio.timeout(30):
        while other.with_client():  # noqa: ASYNC110 - the server tells nobody of it
            await asyncio.sleep(0.05)


async def test_a_key_that_is_wrong_is_told_with_its_remedy(tmp_path: Path, start_server) -> None:
    """I11: where a program gives one."""
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    server = await asyncio.to_thread(start_server, api_key_file=keys)
    for key in (None, "wrong"):
        with pytest.raises(AuthenticationError, match="give it as `api_key` or in STOKER_API_KEY"):
            await Runtime.connect(server.url, api_key=key).start()


async def test_an_id_that_no_header_takes_is_refused_before_anything_is_sent() -> None:
    """I8, I11: in words of ours."""
    runtime = Runtime.connect("http://127.0.0.1:9")
    for call in (anext(runtime.generate("x", request_id="a b")), runtime.embed("x", request_id="a b")):
        with pytest.raises(InvalidRequestError, match="letters, digits") as caught:
            await call
        assert caught.value.param == "request_id"
