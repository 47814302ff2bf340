"""Models that Ollama's client pulls and deletes, and the second port where it looks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace

import httpx
import ollama
import pytest

from hub_stand_in import HubStandIn
from model_folders import tiny_folder
from stoker import Runtime
from stoker.errors import MachineSetupError
from stoker.models.hub.hub import pull
from stoker.server.serve import bind
from stoker.settings import ServerSettings
from tiny_models import write_llama

REPO = "acme/tiny-GGUF"
FILE = "tiny-Q4_K_M.gguf"
PROGRAM = """
import sys
from stoker.server.serve import run_server
from stoker.settings import EngineSettings, ServerSettings
engine = EngineSettings(models=("fake:eog_period=0",), isolation="thread", drain_s=0.2)
sys.exit(run_server(engine, ServerSettings(port=0, ollama_port=0)))
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, which the server under test asks."""
    write_llama(tmp_path / FILE)
    with HubStandIn(repo=REPO, files={FILE: (tmp_path / FILE).read_bytes()}) as found:
        there = {"endpoint": found.endpoint, "attempts": 1}
        monkeypatch.setattr(
            "stoker.models.hub.hub.pull", lambda request, told: pull(replace(request, **there), told)
        )
        yield found


@pytest.fixture
def folder(tmp_path):
    """The models folder."""
    return tmp_path / "models"


@pytest.fixture
def start(start_server, hub, folder):
    """Starts a server beside that hub."""

    def started(**settings):
        server = start_server(
            lambda: Runtime("fake:eog_period=0", isolation="thread", models_dir=folder, ctx_size=64),
            **settings,
        )
        server.ready.result(60)
        return server

    return started


@pytest.fixture
def client(start):
    """The official client of one that downloads."""
    with ollama.Client(host=start(allow_downloads=True).url) as found:
        yield found


def test_a_pull_tells_how_far_it_is_and_the_model_is_served(client, hub, folder):
    """N8: by what it was pulled as and by its own name; a second pull asks no hub."""
    lines = list(client.pull(f"hf.co/{REPO}:Q4_K_M", stream=True))
    assert lines[-1].status == "success"
    size = len(hub.files[FILE])
    assert {line.total for line in lines} <= {None, size}
    assert all(0 <= line.completed <= size for line in lines if line.total)
    assert (folder / REPO / FILE).stat().st_size == size
    assert "tiny-Q4_K_M:latest" in {model.model for model in client.list().models}
    for name in (REPO, f"hf.co/{REPO}:Q4_K_M", f"{REPO}:{FILE}", f"{REPO}:latest", "tiny-q4_k_m"):
        assert client.show(name).details.quantization_level
    assert [model.model for model in client.ps().models] == ["fake:latest"], "nothing was loaded"
    assert client.generate(REPO, "x", raw=True, options={"num_predict": 1}).done
    assert len(client.ps().models) == 2
    num_asked = len(hub.requests)
    assert client.pull(REPO).status == "success"
    assert len(hub.requests) == num_asked


def test_what_cannot_be_pulled_says_why(client, start):
    """N8: a name that the hub has not, a name that is none of the hub's, a server that downloads nothing."""
    for name, why in (("acme/nothing", "no repository"), ("llama3.2", "llama3.2")):
        with pytest.raises(ollama.ResponseError, match=why) as caught:
            client.pull(name)
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match=why):
            list(client.pull(name, stream=True))
    with (
        ollama.Client(host=start().url) as other,
        pytest.raises(ollama.ResponseError, match="--allow-downloads") as caught,
    ):
        other.pull(REPO)
    assert caught.value.status_code == 403


@pytest.mark.long
def test_a_model_is_deleted_from_the_models_folder_alone(client, folder):
    """N8: it is found no more; what lies elsewhere stays."""
    client.pull(REPO)
    assert client.delete(REPO).status == "success"
    assert not (folder / REPO / FILE).exists()
    assert "tiny-Q4_K_M:latest" not in {model.model for model in client.list().models}
    for name in (REPO, "tiny-Q4_K_M"):
        with pytest.raises(ollama.ResponseError, match="not found") as caught:
            client.delete(name)
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="models folder") as caught:
        client.delete("fake")
    assert caught.value.status_code == 403
    assert client.pull(REPO).status == "success"


def test_a_folder_is_shown_and_deleted_with_what_is_its_own(client, folder):
    """F5: another file in it stays."""
    tiny_folder(folder / "acme" / "Tiny-0.1B")
    (folder / "acme" / "Tiny-0.1B" / "notes").mkdir()
    client.pull("acme/Tiny-0.1B")
    assert client.show("acme/Tiny-0.1B").details.quantization_level == "F32"
    assert client.delete("acme/Tiny-0.1B").status == "success"
    assert [each.name for each in (folder / "acme" / "Tiny-0.1B").iterdir()] == ["notes"]
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show("acme/Tiny-0.1B")


# ------------------------------------------------------------ the second port


@pytest.mark.long
def test_the_second_port_is_the_same_server():
    """N9: both answer all routes; the readiness line tells both."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = json.loads(process.stdout.readline())
            assert line["port"] != line["ollama_port"]
            for port in (line["port"], line["ollama_port"]):
                url = f"http://127.0.0.1:{port}"
                assert httpx.get(url).text == "Ollama is running"
                assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "fake"
        finally:
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("given", "port"),
    [({}, None), ({"ollama": True}, 11434), ({"ollama_port": 7}, 7), ({"ollama": True, "ollama_port": 7}, 7)],
)
def test_ollama_alone_means_its_own_port(given, port):
    """N9: unless a port is said."""
    assert ServerSettings(**given).second_port == port


def test_a_second_port_in_use_names_its_flag():
    """N9, S7: the flag that chooses another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineSetupError, match=rf"port {port} .*--ollama-port"):
            bind("127.0.0.1", port, "ollama_port")
