"""The server as a process: port, readiness line, signals, shutdown."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from stand_in import FINISHED, HOLD, StandInRuntime, delta

from stoker.errors import MachineSetupError, ModelFileError
from stoker.ipc.request import FinishReason
from stoker.server.serve import bind

HELLO = [{"role": "user", "content": "Say hello"}]
PROGRAM = """
import sys
from stoker.server.serve import run_server
from stoker.settings import EngineSettings, ServerSettings
engine = EngineSettings(models=("fake:eog_period=0",), isolation="thread", drain_s=0.2)
sys.exit(run_server(engine, ServerSettings(port=0)))
"""


def test_a_port_in_use_is_one_clear_line():
    """S7: it says which port and what to do, before anything else is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineSetupError, match=rf"port {port} on 127.0.0.1 is in use; .*--port"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_one_clear_line():
    """S4: a host that is no address of this machine."""
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(MachineSetupError, match=host):
            bind(host, 0)


def test_what_stops_the_runtime_from_starting_is_raised(start_server):
    """S7: a model that cannot be served ends the server with its own error, and the port is free again."""
    server = start_server(lambda: StandInRuntime(start_error=ModelFileError("x.gguf is cut short")))
    with pytest.raises(ModelFileError, match="cut short"):
        server.stop()
    bind("127.0.0.1", server.port).close()


def test_a_stop_while_loading_ends_cleanly(start_server):
    """L4: nobody waits for models that are not wanted any more."""
    server = start_server(lambda: StandInRuntime(waits_for_models=True))
    server.stop()
    assert not server.ready.done()


def test_a_shutdown_drains_streams_and_refuses_new_work(start_server):
    """L4: what runs gets its end, what comes gets 503."""
    server = start_server()
    server.ready.result(60)
    last = delta("b", finish_reason=FinishReason.CANCELLED)
    server.call(lambda: server.runtime.scripts.append([delta("a"), HOLD, last, FINISHED]))
    with httpx.Client(base_url=server.url) as http:
        body = {"messages": HELLO, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.call(lambda: setattr(server.service.context, "is_stopping", True))
            refused = http.post("/v1/chat/completions", json={"messages": HELLO})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            server.stop()
            shown = list(lines)
    assert any('"finish_reason":"cancelled"' in line for line in shown)
    assert [line for line in shown if line][-1] == "data: [DONE]"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_says_it_is_ready_and_ends_with_zero_on_fake(number):
    """S7, I3, L4: one JSON line, then service, then a signal in the middle of a stream."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = json.loads(process.stdout.readline())
            assert set(line) == {"event", "host", "port", "pid", "models"}
            assert (line["event"], line["host"], line["pid"]) == ("ready", "127.0.0.1", process.pid)
            body = {"messages": HELLO, "stream": True, "ignore_eos": True}
            with (
                httpx.Client(base_url=f"http://127.0.0.1:{line['port']}") as http,
                http.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(number)
                shown = [text for text in lines if text]
            assert shown[-1] == "data: [DONE]"
            assert process.wait(60) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()
