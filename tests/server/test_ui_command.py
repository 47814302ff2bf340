"""`stoker ui`: the page of the running server, a recording of what it is told, and that shown again."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import stat
import subprocess
import sys
import webbrowser
from contextlib import aclosing
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.errors import InvalidRequestError
from stoker.runtime import Runtime
from stoker.server.ui import replay
from stoker.server.ui.replay import FASTEST, EventRecording, replay_app
from stoker.wording import count_text

DOCUMENTS = [
    {"event": "engine", "at": 10.0, "state": "serving"},
    {"event": "snapshot", "at": 11.0, "schema": 2, "may": {"administrate": True}},
    *({"event": "heat", "at": 12.0 + place / 1000, "level": "nominal"} for place in range(1000)),
]


def stoker(*arguments):
    """One call of the program."""
    return CliRunner().invoke(app, ["ui", *map(str, arguments)], prog_name="stoker")


@pytest.fixture
def recording(tmp_path):
    """A recording that begins without a snapshot, as a stream came: with ids and comments."""
    file = tmp_path / "day.jsonl"
    lines = [f"id: 7-{place}\ndata: {json.dumps(one)}\n\n" for place, one in enumerate(DOCUMENTS)]
    file.write_text(": hello\n\n" + "".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def running(_module_servers):
    """A server with a real runtime."""
    served = _module_servers(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    served.ready.result(60)
    return served


async def told(recording, *, after=0, speed=FASTEST):
    """What a reader is told up to the first comment: (number, document)."""
    found = []
    async with aclosing(replay._frames(recording, speed, after)) as frames:
        async for piece in frames:
            if piece.startswith(b":"):
                return found
            for one in filter(None, piece.decode().split("\n\n")):
                number, data = one.split("\n")
                found.append((int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))))
    return found


def test_the_address_is_printed_and_opened(scripted, monkeypatch):
    """U6: in a browser with windows; one of the terminal would take it over."""
    opened = []

    class Browser:
        open = staticmethod(opened.append)

    monkeypatch.setattr(webbrowser, "get", Browser)
    done = stoker("--url", scripted.url)
    assert (done.exit_code, done.stdout) == (0, f"{scripted.url}/ui\n")
    assert opened == [f"{scripted.url}/ui"]
    assert stoker("--url", scripted.url, "--no-browser").stdout == f"{scripted.url}/ui\n"
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    assert "there is no browser" in stoker("--url", scripted.url).stderr
    assert len(opened) == 1


def test_without_a_server_it_says_so(tmp_path):
    """U6: in one line."""
    done = stoker("--url", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert "stoker serve" in done.stderr


def test_what_the_page_is_told_is_recorded_until_ctrl_c(running, tmp_path, until):
    """U6: a document a line, for its owner alone."""
    file = tmp_path / "day.jsonl"
    words = [sys.executable, "-m", "stoker.cli", "ui", "--record", str(file), "--url", running.url]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    documents = file.read_text(encoding="utf-8").splitlines()
    # on a slow machine something may be told between the first and the signal
    assert f" {count_text(len(documents), 'document')}, " in said
    assert json.loads(documents[0])["event"] == "snapshot"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("is_running", [True, False])
def test_a_recording_replaces_no_file(running, tmp_path, is_running):
    """U6: an older one stays as it is, whether a server answers or not."""
    file = tmp_path / "day.jsonl"
    file.write_text("older\n", encoding="utf-8")
    done = stoker("--record", file, "--url", running.url if is_running else "http://127.0.0.1:9")
    assert (done.exit_code, file.read_text(encoding="utf-8")) == (2, "older\n")
    assert (f"--record: {file} is there already" in done.stderr) is is_running


def test_a_recording_that_cannot_begin_leaves_nothing(running, tmp_path):
    """U6: no empty file where no server answers, no folder where none was."""
    assert stoker("--record", tmp_path / "day.jsonl", "--url", "http://127.0.0.1:9").exit_code == 2
    done = stoker("--record", tmp_path / "nope" / "day.jsonl", "--url", running.url)
    assert (done.exit_code, "No such file" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "needs"), [("--speed", 3, "--replay"), ("--max-mb", 3, "--record")]
)
def test_what_is_of_a_recording_is_refused_without_one(scripted, option, value, needs):
    """U6: rather than ignored."""
    done = stoker(option, value, "--no-browser", "--url", scripted.url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} is of a recording: {needs} FILE" in done.stderr


async def test_a_recording_ends_at_its_bound(running, tmp_path, capsys):
    """U6: what does not fit any more is not begun."""
    from stoker.cli.ui.command import _Tape  # noqa: PLC0415 - what the command writes with
    from stoker.remote.connection import ServerConnection  # noqa: PLC0415 - likewise

    tape = _Tape(tmp_path / "day.jsonl", max_bytes=10)
    await tape.write(ServerConnection(running.url, None))
    assert (tape.num_documents, (tmp_path / "day.jsonl").read_bytes()) == (0, b"")
    assert "ended at --max-mb" in capsys.readouterr().err


async def test_a_recording_is_told_in_order_and_says_what_it_is(recording):
    """U6: whose reader may not steer; it begins with a snapshot in any case."""
    found = await told(EventRecording(recording))
    assert [number for number, _ in found] == list(range(1, len(DOCUMENTS) + 2))
    documents = [document for _, document in found]
    mark = {"may": {"administrate": False}, "replay": {"speed": "max"}}
    assert documents[0] == {"event": "snapshot", "schema": 2, "at": 10.0, **mark}
    assert documents[1] == DOCUMENTS[0]
    assert documents[2] == DOCUMENTS[1] | mark
    assert documents[3:] == DOCUMENTS[2:]


async def test_a_reader_goes_on_behind_the_last_event(recording):
    """U6: as at a server."""
    everything = await told(EventRecording(recording))
    assert await told(EventRecording(recording), after=500) == everything[500:]


async def test_a_recording_keeps_its_pace(recording, monkeypatch):
    """U6: what is told later waits for its time, on a clock that is the test's."""
    waited = []
    clock = asyncio.get_running_loop().time()

    async def sleep(seconds):
        nonlocal clock
        waited.append(seconds)
        clock += seconds

    class Loop:
        def time(self):
            return clock

    own = SimpleNamespace(**vars(asyncio) | {"sleep": sleep, "get_running_loop": Loop})
    monkeypatch.setattr(replay, "asyncio", own)  # servers of other tests sleep on in their threads
    assert len(await told(EventRecording(recording), speed=2.0)) == len(DOCUMENTS) + 1
    assert sum(waited) == pytest.approx((DOCUMENTS[-1]["at"] - DOCUMENTS[0]["at"]) / 2)


def test_a_compressed_recording_is_read(tmp_path):
    """U6: .gz."""
    file = tmp_path / "day.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(json.dumps(one).encode() + b"\n" for one in DOCUMENTS)))
    assert list(EventRecording(file).documents()) == DOCUMENTS


def test_what_is_no_recording_is_refused(tmp_path):
    """U6: with the line."""
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    (tmp_path / "text").write_text('{"event": "heat"}\nhello\n', encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="holds no events"):
        EventRecording(tmp_path / "empty")
    with pytest.raises(InvalidRequestError, match="text, line 2 is no event"):
        list(EventRecording(tmp_path / "text").documents())
    for wrong in ("0", "-1", "quick", "inf"):
        done = stoker("--replay", tmp_path / "text", "--speed", wrong)
        assert (done.exit_code, "speed" in done.stderr) == (2, True), wrong
    done = stoker("--replay", tmp_path / "text", "--record", tmp_path / "x")
    assert done.exit_code == 2


async def test_a_recording_has_the_page_and_nothing_else(recording):
    """U6: it steers nothing, and is there for this machine alone."""
    transport = httpx.ASGITransport(replay_app(EventRecording(recording), FASTEST))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        assert "<title>Stoker" in (await http.get("/", follow_redirects=True)).text
        for path in ("/v1/models", "/v1/runtime/suspend", "/ui/assets/x/app.js"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "recording"), path
        assert (await http.get("/ui", headers={"Host": "evil.example"})).status_code == 400
