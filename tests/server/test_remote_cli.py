"""`stoker ps`, `load`, `unload`, `pin`, `suspend` and `resume` against a server."""

from __future__ import annotations

import json
import os
import socket

import msgspec
import pytest
from stand_in import INFO, StandInRuntime
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.cli.commands import ps, remote
from stoker.errors import InsufficientMemoryError, InvalidRequestError
from stoker.ipc.request import Priority
from stoker.ipc.status import (
    DeviceStatus,
    EngineStatus,
    MachineStatus,
    MemoryStatus,
    ModelStatus,
    SlotStatus,
    WaitStatus,
)
from stoker.server.run_file import RunFile, registered
from stoker.settings import EngineSettings


@pytest.fixture
def call(scripted, monkeypatch):
    """One call of the program at the scripted server; a proxy of the environment is not asked."""
    monkeypatch.setenv("STOKER_URL", scripted.url)
    monkeypatch.delenv("STOKER_API_KEY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    def invoke(*arguments):
        return CliRunner().invoke(app, list(arguments))

    return invoke


def busy_engine():
    """Two models, of which one works for somebody, and somebody who waits."""
    return EngineStatus(
        slots=[
            SlotStatus(
                id=0,
                state="decode",
                model="stand-in",
                num_tokens=70,
                request_id="chatcmpl-1",
                priority=Priority.INTERACTIVE,
            ),
            SlotStatus(id=1, state="idle", model="stand-in", num_tokens=30),
        ],
        queue=[
            WaitStatus(
                request_id="cmpl-2", priority=Priority.BACKGROUND, model="stand-in", position=0, eta_s=90
            )
        ],
        parked=[WaitStatus(request_id="cmpl-3", priority=Priority.BACKGROUND, model="stand-in")],
        counters={},
        kv_cells_total=1,
        kv_cells_used=0,
        models=[
            ModelStatus(
                id="stand-in",
                state="ready",
                bytes={"weights": 98_000_000, "kv": 2_000_000},
                leases=2,
                degraded=["context 4096 instead of 16384"],
            ),
            ModelStatus(
                id="tiny[x]", state="loading", stage="weights", fraction=0.25, bytes={"kv": 3_000_000}
            ),
            ModelStatus(id="idle", state="ready", keep_alive_s=600, unload_in_s=125.0),
            ModelStatus(id="held", state="ready", is_pinned=True),
            ModelStatus(id="broken", state="failed", reason="it is cut short"),
        ],
        devices=[
            DeviceStatus(id="CPU", name="CPU", kind="CPU", is_used=True),
            DeviceStatus(
                id="CUDA0",
                name="NVIDIA H100",
                kind="CUDA",
                is_used=True,
                total=80 * 2**30,
                free=10 * 2**30,
                own=65 * 2**30,
                others=5 * 2**30,
                celsius=61.4,
                power_w=350.2,
            ),
            DeviceStatus(
                id="CUDA1",
                name="NVIDIA H100",
                kind="CUDA",
                total=80 * 2**30,
                free=80 * 2**30,
                own=None,
                others=None,
                held_by="process 7 (model qwen)",
            ),
        ],
        memory=MemoryStatus(
            limit=4_000_000_000,
            footprint=600_000_000,
            available=3_000_000_000,
            pressure="warning",
            pressure_source="CUDA0",
            heat="fair",
        ),
    )


def test_ps_shows_models_requests_and_memory(call, scripted):
    """SPEC I1, I4: a line a model with memory, slots and how long it stays; a line a request; the sums."""
    scripted.runtime.engine = busy_engine()
    done = call("ps")
    assert done.exit_code == 0
    rows = {line.split()[0]: " ".join(line.split()) for line in done.stdout.splitlines() if line.strip()}
    assert rows["stand-in"] == "stand-in ready 95.4 MiB 1/2 100 in use context 4096 instead of 16384"
    assert rows["tiny[x]"] == "tiny[x] loading weights 25% (2.9 MiB)"
    assert rows["idle"].endswith("for 2 min")
    assert rows["held"].endswith("pinned")
    assert rows["broken"] == "broken failed it is cut short"
    assert rows["chatcmpl-1"] == "chatcmpl-1 interactive 70 decode stand-in"
    assert rows["cmpl-2"] == "cmpl-2 background 0 waits, next in line, about 2 min stand-in"
    assert rows["cmpl-3"] == "cmpl-3 background 0 parked stand-in"
    assert "572 MiB of 3.7 GiB used, 2.8 GiB available, pressure warning (CUDA0), heat fair" in done.stdout


def test_ps_of_one_model_fits_a_terminal(call, scripted):
    """SPEC I1: with an id of the longest kind; the model stands above, alone."""
    engine = busy_engine()
    named = msgspec.structs.replace(engine.slots[0], request_id="chatcmpl-" + 32 * "0")
    scripted.runtime.engine = msgspec.structs.replace(
        engine, models=engine.models[:1], slots=[named], queue=[], parked=[]
    )
    lines = call("ps").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("request "))
    assert [line.split()[1:] for line in lines[at : at + 2]] == [
        ["class", "tokens", "state"],
        ["interactive", "70", "decode"],
    ]
    assert max(map(len, lines[at : at + 2])) <= 80


def test_ps_shows_the_memory_of_each_accelerator(call, scripted):
    """SPEC M9: who has it, how it is, and another program that holds it; one that has none is not there."""
    scripted.runtime.engine = busy_engine()
    lines = " ".join(call("ps").stdout.split())
    assert (
        "CUDA0: NVIDIA H100, 10 GiB of 80 GiB free, own 65 GiB, others 5 GiB, 61 °C, 350 W"
        " CUDA1: NVIDIA H100, 80 GiB of 80 GiB free, held by process 7 (model qwen)"
    ) in lines
    assert "CPU:" not in lines


def test_ps_at_a_gate_shows_its_machines(call, scripted):
    """P10: a line a machine, and how many are up in the place of an engine."""
    up = MachineStatus(
        name="a:1", url="http://a:1", state="up", num_slots=8, num_busy=2, num_requests=3, models=["m"]
    )
    down = MachineStatus(
        name="b:2", url="http://b:2", state="down", num_slots=8, num_moved=5, reason="no server answers"
    )
    scripted.runtime.engine = msgspec.structs.replace(busy_engine(), machines=[up, down])
    lines = [" ".join(line.split()) for line in call("ps").stdout.splitlines()]
    assert "a:1 up 2/8 3 0 m" in lines
    assert "b:2 down 0 5 no server answers" in lines
    assert "machines: 1 of 2 up" in lines
    assert not any(line.startswith("engine:") for line in lines)


def test_ps_speaks_json(call):
    """SPEC I1, I4: the document of the server."""
    status = json.loads(call("ps", "--json").stdout)
    assert status["models"][0]["id"] == "stand-in"


def test_ps_of_an_idle_server_has_no_table_of_requests(call, scripted):
    """SPEC I1: nothing runs, nothing is listed."""
    scripted.runtime.engine = EngineStatus(
        slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0
    )
    done = call("ps")
    assert done.exit_code == 0
    assert "request" not in done.stdout


def test_each_command_asks_the_server_for_its_one_thing(call, scripted):
    """SPEC I4, L2, R3: and says what came of it."""
    said = [
        call("load", "m", "--keep-alive", "5m", "--ctx-size", "64", "--slots", "2"),
        call("load", "stand-in", "--keep-alive", "5m", "--ctx-size", "64", "--slots", "2"),
        call("unload", "stand-in"),
        call("pin", "stand-in"),
        call("pin", "stand-in", "--off"),
        call("suspend"),
        call("suspend", "--grace-s", "0.5"),
        call("resume"),
    ]
    assert [done.exit_code for done in said] == [2, *[0] * 7]
    assert "no model 'm' is served" in said[0].stderr
    assert f"stand-in is ready: 1 B, context {INFO.n_ctx}" in said[1].stdout
    assert [done.stdout.strip() for done in said[2:]] == [
        "stand-in is not in memory any more",
        "stand-in is pinned: once it is in memory it stays there",
        "stand-in may be unloaded",
        "suspended",
        "suspended",
        "serving",
    ]
    assert scripted.runtime.calls == [
        ("load", "m", 300.0, 64, 2),
        ("load", "stand-in", 300.0, 64, 2),
        ("unload", "stand-in"),
        ("pin", "stand-in", True),
        ("pin", "stand-in", False),
        ("suspend", "request", None),
        ("suspend", "request", 0.5),
        ("resume",),
    ]


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_a_grace_that_is_no_number_suspends_nothing(call, scripted, seconds):
    """T2: JSON has no such number, so the server would take it for none at all."""
    done = call("suspend", "--grace-s", seconds)
    assert (done.exit_code, done.stderr) == (2, f"stoker: --grace-s is no finite number, got {seconds}\n")
    assert scripted.runtime.calls == []


def test_a_load_says_where_the_model_shall_lie(call, scripted):
    """SPEC R11: by the flags of `serve`; what is not given stays as it is."""
    flags = """--gpu-layers 20 --device CUDA1 --device 0 --split-mode row --tensor-split 3,1 --main-gpu 1
        --cpu-moe 4 --kv-type q8_0 --kv-layout pool --no-mmap --no-kv-offload --expert-budget 2GiB
        --backend llama"""
    assert call("load", "stand-in", *flags.split()).exit_code == 0
    assert call("load", "stand-in").exit_code == 0
    assert scripted.runtime.placements == [
        {
            "gpu_layers": 20,
            "device": ("CUDA1", "0"),
            "split_mode": "row",
            "tensor_split": (3.0, 1.0),
            "main_gpu": 1,
            "cpu_moe": 4,
            "kv_type": "q8_0",
            "kv_layout": "pool",
            "mmap": False,
            "kv_offload": False,
            "expert_budget": 2 * 2**30,
            "backend": "llama",
        },
        {},
    ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--gpu-layers banana", "--gpu-layers: 'banana' is neither a number of layers nor auto or all"),
        ("--tensor-split 3,x", "--tensor-split: '3,x' are no proportions; write such as 3,1"),
        ("--main-gpu -1", "--main-gpu: '-1' is less than 0"),
        ("--kv-type q5", "--kv-type: 'q5' is none of 'f16', 'bf16', 'q8_0' or 'q4_0'"),
        ("--device none --device CUDA0", "--device: none and cpu stand alone, got none, CUDA0"),
    ],
)
def test_a_place_that_cannot_be_meant_is_refused_before_the_server_is_asked(call, scripted, flags, text):
    """T2: one line that names what was typed and what can be."""
    done = call("load", "stand-in", *flags.split())
    assert (done.exit_code, done.stderr) == (2, f"stoker: {text}\n")
    assert scripted.runtime.calls == []


def test_a_device_that_the_server_does_not_have_is_told_by_its_flag(call, scripted):
    """T2, SPEC R11: with those that it has."""
    text = "there is no 'CUDA9' here; there are 0 CUDA0 (H100), none"
    scripted.runtime.load_error = InvalidRequestError(f"device: {text}", param="device")
    done = call("load", "stand-in", "--device", "CUDA9")
    assert (done.exit_code, done.stderr) == (2, f"stoker: --device: {text}\n")


def test_each_command_speaks_json(call):
    """SPEC I1: for programs."""
    assert json.loads(call("load", "stand-in", "--json").stdout)["state"] == "ready"
    assert json.loads(call("suspend", "--json").stdout) == {"suspended": True}
    assert json.loads(call("resume", "--json").stdout) == {"suspended": False}


def test_an_error_of_the_server_is_one_line_with_its_numbers(call, scripted):
    """SPEC R1: the same sentence that HTTP clients get."""
    scripted.runtime.load_error = InsufficientMemoryError("needs 5 GiB, free 3 GiB")
    done = call("load", "m")
    assert (done.exit_code, done.stderr.strip()) == (2, "stoker: needs 5 GiB, free 3 GiB")


def test_a_running_server_is_found_without_its_url(call, scripted, monkeypatch):
    """T4: by its run file, if it answers; one that is named wins."""
    monkeypatch.delenv("STOKER_URL")
    run_dir = EngineSettings().run_dir
    deaf = RunFile(url="http://127.0.0.1:9", pid=os.getpid(), version="1", started_at=2.0)
    ours = RunFile(url=scripted.url, pid=os.getppid(), version="1", started_at=1.0)
    with registered(run_dir, deaf), registered(run_dir, ours):
        found = json.loads(call("ps", "--json").stdout)
        assert found["models"][0]["id"] == "stand-in"
        assert "http://127.0.0.1:9" in call("ps", "--url", "http://127.0.0.1:9").stderr
    assert call("ps", "--url", scripted.url).exit_code == 0


def test_a_server_that_is_not_there_or_not_ours_is_one_line(call, start_server):
    """SPEC I1: it says where it looked and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    done = call("ps", "--url", f"http://127.0.0.1:{free}")
    assert done.exit_code == 2
    assert f"no server answers at http://127.0.0.1:{free}" in done.stderr
    assert "stoker serve" in done.stderr
    for nonsense in ("ftp://x", "http://[", "nothing"):
        assert call("ps", "--url", nonsense).exit_code == 2
    started = start_server()
    strange = call("ps", "--url", f"{started.url}/elsewhere")
    assert strange.exit_code == 2


def test_the_key_comes_from_the_environment_or_a_flag(call, start_server, tmp_path, monkeypatch):
    """SPEC S4: without it the server refuses, and the line says why."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = start_server(StandInRuntime, api_key_file=keys, admin_key_file=keys)
    server.ready.result(60)
    refused = call("ps", "--url", server.url)
    assert refused.exit_code == 2
    assert "API key" in refused.stderr
    assert call("ps", "--url", server.url, "--api-key", "secret").exit_code == 0
    monkeypatch.setenv("STOKER_API_KEY", "secret")
    assert call("resume", "--url", server.url).exit_code == 0


@pytest.mark.parametrize(
    "words", [("ps",), ("load", "m"), ("unload", "m"), ("pin", "m"), ("suspend",), ("resume",)]
)
def test_the_answer_of_another_version_is_no_traceback(words, call, monkeypatch):
    """T2: what lacks a field is none of ours."""
    for module in (ps, remote):
        monkeypatch.setattr(module, "ask_server", lambda *_: {"version": "9"})
    done = call(*words)
    assert done.exit_code == 2
    assert "no Stoker, or one of another version: its answer has no '" in done.stderr
