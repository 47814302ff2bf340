"""`stoker serve` as a person sees it: in a terminal, in a pipe, in the journal, and at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from stoker.cli.serve_screen import ServeInLog, StatusLine, engine_facts, facts_of
from stoker.ipc.model import ModelInfo
from stoker.ipc.status import EngineHealth, EngineStatus, MemoryStatus, ModelStatus, RuntimeStatus
from stoker.settings import EngineSettings, ServerSettings
from terminal import Terminal

FAKE = "fake:eog_period=0"
SLOW = "fake:eog_period=0,step_delay_s=0.02"
HELLO = {"messages": [{"role": "user", "content": "Say hello"}], "ignore_eos": True}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - the point of some tests


@pytest.fixture
def place(tmp_path):
    """Folders of its own for a server."""
    names = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")
    return {name: str(tmp_path / name) for name in names}


def words(*options, model=FAKE):
    """A command line of `stoker serve` that is quick."""
    return ["serve", "-m", model, "--port", "0", "--isolation", "thread", "--no-follow-sleep", *options]


def readiness(text):
    """The readiness line, which a terminal may have wrapped."""
    return json.loads(re.search(r"\{\"event\": \"ready\".*?\}", text.replace("\n", "")).group())


class Client:
    """Asks a server; `begin` leaves an answer running."""

    def __init__(self, ready):
        self._url = f"http://127.0.0.1:{ready['port']}"

    def get(self, path, **headers):
        """What is there."""
        return httpx.get(f"{self._url}{path}", headers=headers, timeout=60)

    def ask(self, **fields):
        """One whole answer."""
        body = HELLO | {"max_tokens": 5} | fields
        return httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=60)

    def begin(self):
        """A stream without end; the last line that comes is kept in `lines`."""
        self.lines = []
        has_begun = threading.Event()

        def read():
            url, body = f"{self._url}/v1/chat/completions", HELLO | {"stream": True, "max_tokens": 10_000}
            try:
                with httpx.stream("POST", url, json=body, timeout=60) as answer:
                    for line in answer.iter_lines():
                        self.lines.append(line)
                        has_begun.set()
            except httpx.HTTPError as error:
                self.lines.append(repr(error))

        self._reader = threading.Thread(target=read)
        self._reader.start()
        assert has_begun.wait(60)

    def end(self):
        """All that came, once the stream is over."""
        self._reader.join(60)
        return self.lines


class Piped:
    """A server whose output goes to pipes; killed at the end."""

    def __init__(self, *argv, env):
        command = [sys.executable, "-m", "stoker.cli", *argv]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | env)

    def __enter__(self):
        self.client = Client(json.loads(self.process.stdout.readline()))
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def ended(self):
        """Its exit code, the rest of its stdout and its stderr, after SIGTERM."""
        self.process.terminate()
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_where_a_line_a_request_and_how_it_is_doing(place, columns):
    """T12: one block, a line for each request, a status at the bottom; the readiness line is there too."""
    with Terminal("stoker", *words(), columns=columns, env=place) as terminal:
        shown = terminal.until("0 running · 0 waiting")
        ready = readiness(shown)
        url = f"http://127.0.0.1:{ready['port']}"
        assert re.search(rf"^  OpenAI API +{url}/v1$", shown, re.MULTILINE)
        assert re.search(rf"^  Anthropic API +{url}$", shown, re.MULTILINE)
        assert re.search(r"^  model +fake, 16,384 tokens of context$", shown, re.MULTILINE)
        assert re.search(r"^  slots +8, sharing 16,384 tokens$", shown, re.MULTILINE)
        assert re.search(
            r"^  keys +not asked for; only this machine's programs reach it$", shown, re.MULTILINE
        )
        assert re.search(r"^  cache +cells, 1 GiB of memory, 4 GiB in", shown, re.MULTILINE)
        assert re.search(r"^  computes on +fake · CPU, 1 thread$", shown, re.MULTILINE)
        assert terminal.lines[-1].lstrip().startswith("0 running")
        client = Client(ready)
        assert client.ask().status_code == 200
        assert client.ask(service_tier="flex", seed=1).status_code == 200
        lines = [line for line in terminal.until("background ").splitlines() if " out " in line]
        clock, tokens = r"^\d\d:\d\d:\d\d", r"+\d+ in    5 out +\d\.\d\d s +\d+/s"
        assert re.search(rf"{clock} interactive  {tokens} length fake$", lines[0])
        assert re.search(rf"{clock} background   {tokens} length fake", lines[1])
        terminal.send("\x03")
        assert terminal.ended() == 0
        assert "stopping" in terminal.text
        assert not terminal.lines[-1].lstrip().startswith("0 running")
        assert max(map(len, terminal.lines)) <= columns


@pytest.mark.long
def test_a_narrow_terminal_breaks_no_url(place):
    """T12: the terminal itself wraps it, so that it can be clicked and copied."""
    with Terminal("stoker", *words(), columns=40, env=place) as terminal:
        shown = terminal.until("running")
        url = f"http://127.0.0.1:{readiness(shown)['port']}"
    assert f"status         {url}/v1/runtime" in shown.replace("\n", "")


@pytest.mark.long
def test_a_window_made_narrower_keeps_one_status_line(place):
    """T12: the line fits any usual width, so nothing of it stays behind."""
    with Terminal("stoker", *words(), columns=120, env=place) as terminal:
        client = Client(readiness(terminal.until("0 running")))
        terminal.resize(80)
        client.ask()
        terminal.until(" out ")
        terminal.until(lambda shown: shown.lines[-1].lstrip().startswith("0 running"))
        assert sum("running · " in line for line in terminal.lines) == 1
        assert len(terminal.lines[-1]) <= 78


@pytest.mark.long
def test_ctrl_c_says_what_it_waits_for_and_again_ends_at_once(place):
    """T14: the first lets a request finish and says so, the second ends it, its stream has an end."""
    with Terminal("stoker", *words("--drain-s", "600", model=SLOW), env=place) as terminal:
        terminal.until("0 running")
        client = Client(readiness(terminal.text))
        client.begin()
        terminal.send("\x03")
        terminal.until("1 request is finishing; Ctrl-C again ends at once")
        terminal.send("\x03")
        assert terminal.ended() == 128 + signal.SIGINT
        assert "ending at once" in terminal.text
        assert "data: [DONE]" in client.end()


@pytest.mark.long
def test_a_third_ctrl_c_changes_nothing(place):
    """T14: who presses it often gets no traceback."""
    with Terminal("stoker", *words("--drain-s", "600", model=SLOW), env=place) as terminal:
        terminal.until("0 running")
        client = Client(readiness(terminal.text))
        client.begin()
        terminal.send("\x03")
        terminal.until("is finishing")
        terminal.send("\x03")
        terminal.until("ending at once")
        terminal.send("\x03")
        assert terminal.ended() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.text
        client.end()


@pytest.mark.long
def test_sigterm_names_itself_and_drains_for_drain_s(place):
    """T14, L4: with a short drain the request ends as cancelled, and the server with 0."""
    with Piped(*words("--drain-s", "0.2", model=SLOW), env=place) as server:
        server.client.begin()
        code, out, err = server.ended()
        assert (code, out) == (0, "")
        assert "1 request is finishing; SIGTERM again ends at once" in err
        assert "data: [DONE]" in server.client.end()


@pytest.mark.long
def test_in_a_pipe_the_log_is_plain_lines(place):
    """T13: level and logger in each line; stdout has the readiness line alone."""
    with Piped(*words(), env=place) as server:
        server.client.ask()
        _, out, err = server.ended()
    assert out == ""
    stamp = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO"
    assert re.search(rf"{stamp} stoker\.models: fake is ready$", err, re.MULTILINE)
    assert re.search(
        rf"{stamp} stoker\.requests: interactive +\d+ in    5 out .* length fake$", err, re.MULTILINE
    )
    assert re.search(rf"{stamp} stoker\.cli\.serve_screen: ready: OpenAI API: http://127", err, re.MULTILINE)
    assert "\x1b" not in err


@pytest.mark.long
def test_json_lines_carry_the_figures(place):
    """T13: `--log-format json` is one object a line, a request's with all that its event has."""
    with Piped(*words("--log-format", "json"), env=place) as server:
        server.client.ask(user="x")
        _, _, err = server.ended()
    records = [json.loads(line) for line in err.splitlines()]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    (request,) = [record for record in records if record["logger"] == "stoker.requests"]
    assert (request["priority"], request["completion_tokens"]) == ("interactive", 5)
    assert (request["route"], request["finish_reason"]) == ("/v1/chat/completions", "length")
    assert request["request_id"]


@pytest.mark.long
def test_the_journal_gets_priorities(place):
    """T13: under systemd each line says its level as journald reads it, and no time, which it has."""
    ours, theirs = socket.socketpair()
    found = os.fstat(theirs.fileno())
    env = os.environ | place | {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    command = [sys.executable, "-m", "stoker.cli", *words("--host", EVERYWHERE, "--insecure")]
    with ours, theirs, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        theirs.close()
        try:
            client = Client(json.loads(process.stdout.readline()))
            refused = client.get("/v1/models", Host="box.lan:1")
            assert refused.status_code == 403
            assert "--allowed-host box.lan" in refused.json()["error"]["message"]
            client.get("/v1/models", Host="box.lan:1")
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
        said = ours.makefile().read().splitlines()
    assert "<6>stoker.models: fake is ready" in said
    refusals = [
        line for line in said if line.startswith("<4>stoker.server.inbound.gate: a client was refused")
    ]
    assert len(refusals) == 1
    assert refusals[0].endswith("can allow it with --allowed-host box.lan")
    assert all(re.match(r"<[3-7]>", line) for line in said)


@pytest.mark.long
def test_quiet_says_nothing_but_the_readiness_line(place):
    """T12: in a terminal and elsewhere; warnings stay."""
    with Terminal("stoker", *words("--quiet"), env=place) as terminal:
        terminal.until(lambda shown: '"fake"]}' in "".join(shown.lines))  # where it is folded, numbers decide
        Client(readiness("".join(terminal.lines))).ask()
        terminal.send("\x03")
        assert terminal.ended() == 0
        (line,) = "".join(terminal.lines).removesuffix("^C").splitlines()
        assert readiness(line)["event"] == "ready"


def test_a_log_file_gets_the_log(place, tmp_path):
    """T13: `--log-file`; stderr stays empty."""
    file = tmp_path / "deep" / "stoker.log"
    with Piped(*words("--log-file", str(file), "--log-level", "warning"), env=place) as server:
        server.client.get("/v1/models", Host="box.lan")
        code, _, err = server.ended()
    assert (code, err) == (0, "")
    (line,) = file.read_text().splitlines()
    assert "WARNING stoker.server.inbound.gate" in line


@pytest.mark.long
def test_other_machines_need_a_key_or_a_word(place, tmp_path):
    """S4: `--host 0.0.0.0` alone is refused with the flags; with a key file it serves."""
    command = [sys.executable, "-m", "stoker.cli", *words("--host", EVERYWHERE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | place
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for flag in ("--api-key-file", "--allowed-host", "--insecure"):
        assert flag in done.stderr
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with Piped(*words("--host", EVERYWHERE, "--api-key-file", str(keys)), env=place) as server:
        assert server.client.get("/v1/models").status_code == 401
        assert server.ended()[0] == 0


@pytest.mark.long
def test_a_service_manager_is_told_when_it_is_ready_and_when_it_stops(place, tmp_path):
    """T12: `Type=notify` of systemd."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)
        with Piped(*words(), env=place | {"NOTIFY_SOCKET": str(address)}) as server:
            assert manager.recv(100) == b"READY=1"
            server.process.terminate()
            assert manager.recv(100) == b"STOPPING=1"


def test_help_names_every_option_whole(place):
    """T1: at 80 columns each can be typed as it stands there; they stand in panels."""
    with Terminal("stoker", "serve", "--help", columns=80, rows=200, env=place) as terminal:
        assert terminal.ended() == 0
        shown = terminal.text
    assert "…" not in shown
    for option in ("--default-max-tokens", "--cache-ram-bytes", "--background-patience-s", "--drain-s"):
        assert option in shown
    for panel in ("Models", "Memory", "Cache", "Images", "Network", "Scheduling", "Logging", "Examples"):
        assert re.search(rf"\b{panel}\b", shown)


@pytest.mark.parametrize(
    ("is_repeatable", "cost", "shown"),
    [
        (True, None, ["on"]),
        (True, 0.021, ["on, takes up to 2% more time here"]),
        (True, -0.02, ["on, takes up to 0% more time here"]),
        (False, 0.21, ["off, on would take up to 21% more time here"]),
        (False, None, []),
    ],
)
def test_the_block_says_whether_answers_are_repeatable_and_what_that_takes(is_repeatable, cost, shown):
    """E3, T12: where it was measured or chosen; a model whose mode changes nothing has no such line."""
    info = ModelInfo(
        id="m", path="m", n_ctx=8, n_batch=8, num_slots=1, num_threads=1, kv_type="f16", label="CPU"
    )
    info = msgspec.structs.replace(info, is_repeatable=is_repeatable, repeatable_cost=cost)
    service = SimpleNamespace(
        address=("127.0.0.1", 1),
        second_port=None,
        context=SimpleNamespace(runtime=SimpleNamespace(models=[info])),
    )
    facts = facts_of(service, ServerSettings(), partial(engine_facts, EngineSettings()))
    assert [text for name, text in facts if name == "repeatable"] == shown


def test_the_block_names_each_of_the_backends_that_compute():
    """T12, K8: what computes several models is told once."""
    first = ModelInfo(
        id="m", path="m", n_ctx=8, n_batch=8, num_slots=1, num_threads=1, kv_type="f16", label="CPU"
    )
    others = [msgspec.structs.replace(first, label=label) for label in ("MLX · CPU", "CPU", "")]
    facts = engine_facts(EngineSettings(), [first, *others])
    at = next(number for number, (name, _) in enumerate(facts) if name == "computes on")
    assert facts[at : at + 2] == [("computes on", "CPU, 1 thread"), ("", "MLX · CPU, 1 thread")]


@pytest.mark.parametrize(
    ("settings", "cells", "shown"),
    [
        ({"ctx_size": 16_384}, (), "8, sharing 16,384 tokens"),
        ({"ctx_size": 0}, (), "8, sharing the model's own context"),
        ({"ctx_size": 16_384}, (4096, 0), "8, sharing 4,096 tokens"),
        ({"ctx_size": 0}, (8192, 4096, 8192), "8, sharing 4,096 to 8,192 tokens"),
    ],
)
def test_the_block_says_how_many_tokens_slots_share(settings, cells, shown):
    """T12, R2: a model may have got less than was asked for; where there is one slot nothing is shared."""
    info = ModelInfo(id="m", path="m", n_ctx=8, n_batch=8, num_slots=4, num_threads=1, kv_type="f16")
    models = [msgspec.structs.replace(info, num_cells=number) for number in cells]
    models += [msgspec.structs.replace(info, num_slots=1, num_cells=256)]
    assert dict(engine_facts(EngineSettings(slots=8, **settings), models))["slots"] == shown


def test_the_log_has_all_that_stands_below_a_name(caplog):
    """T12: every machine of a gate, and every backend that computes."""
    facts = [("machines", "http://a"), ("", "http://b"), ("", "http://c")]
    service = SimpleNamespace(
        address=("127.0.0.1", 1),
        second_port=None,
        context=SimpleNamespace(runtime=SimpleNamespace(models=[])),
    )
    with caplog.at_level("INFO", "stoker.cli.serve_screen"):
        ServeInLog(EngineSettings(), ServerSettings(), lambda _: facts).ready("{}", service)
    assert "; machines: http://a, http://b, http://c" in caplog.text


def test_the_line_says_what_is_loaded_and_how_warm_it_is():
    """T12: beside who runs and waits, and where memory stands; nothing of what is as usual."""
    status = RuntimeStatus(
        pid=1,
        state="serving",
        restarts=0,
        label="fake",
        threads=1,
        health=EngineHealth(state="serving"),
        engine=EngineStatus(
            slots=[],
            queue=[],
            parked=[],
            counters={},
            kv_cells_total=0,
            kv_cells_used=0,
            models=[
                ModelStatus(id="big", state="loading", fraction=0.43),
                ModelStatus(id="m", state="ready"),
            ],
            memory=MemoryStatus(limit=2**30, footprint=2**29, pressure="warning", heat="serious"),
        ),
    )
    service = SimpleNamespace(context=SimpleNamespace(is_stopping=False))
    text = StatusLine(0.0).text_of(status, service, 60.0)
    shown = "0 running · 0 waiting · big 43% · 0 tokens/s · 512 MiB of 1 GiB · memory warning · heat serious"
    assert text == f"{shown} · up 1 min"
