"""Commands beside a server that runs here: it is asked, and said so, or left aside for a reason."""

from __future__ import annotations

import json
import os
import socket

import pytest
from typer.testing import CliRunner

from pictures import plain
from stoker.cli import target
from stoker.cli.app import app
from stoker.runtime import Runtime
from stoker.server.run_file import RunFile, registered
from stoker.settings import EngineSettings

TALKER = "fake:id=talker,eog_period=0,vision=1"
EMBEDDER = "fake:id=embedder,encoder=1"


def make_runtime():
    """Two models, of which one embeds."""
    return Runtime(models=(TALKER, EMBEDDER), isolation="thread", slots=2)


@pytest.fixture(scope="module")
def server(_module_servers):
    """A server that runs here."""
    served = _module_servers(make_runtime)
    served.ready.result(60)
    return served


@pytest.fixture(autouse=True)
def found(server, monkeypatch):
    """The run file of the server, and nothing of the environment."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        monkeypatch.delenv(name)
    entry = RunFile(url=server.url, pid=os.getpid(), version="1", started_at=1.0)
    with registered(EngineSettings().run_dir, entry):
        yield server


def stoker(*arguments, **how):
    """One call of the program."""
    return CliRunner().invoke(app, [str(word) for word in arguments], prog_name="stoker", **how)


def asking(model, server):
    """The line that says so."""
    return f"stoker: asking {model} at {server.url} (--no-server loads a model here)\n"


def test_a_prompt_is_answered_by_the_running_server(server):
    """T4: no second copy is loaded, and stderr says who was asked; stdout is the answer alone."""
    done = stoker("run", "Hi", "-n", "8", "--seed", "3")
    assert done.exit_code == 0, done.output
    assert done.stderr == asking("talker", server)
    here = stoker("run", "Hi", "-n", "8", "--seed", "3", "--no-server", "-m", TALKER)
    assert (here.exit_code, here.stderr) == (0, "")
    assert done.stdout == here.stdout != ""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "\udcff", "-n", "4"),
        ("embed", "\udcff"),
        ("embed", "\udcff", "-m", EMBEDDER, "--no-server"),
        ("run", "Hi", "--json-schema", "not-utf-8"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(words, tmp_path, monkeypatch):
    """T2: bytes that are not UTF-8 come as lone surrogates from a pipe and from the command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-utf-8").write_bytes(b"\xff")
    done = stoker(*words)
    assert done.exit_code == 2
    assert "not valid U" in done.stderr.splitlines()[-1]


def test_texts_are_embedded_by_the_encoder_of_the_running_server(server):
    """T4, T5: of its models the one that is fit, which is not the default."""
    done = stoker("embed", "one", "two")
    assert done.stderr == asking("embedder", server)
    assert done.stdout == stoker("embed", "one", "two", "--no-server", "-m", EMBEDDER).stdout


def test_choices_are_weighed_by_the_running_server(server):
    """T4: `choose` as well, by name or by the first that generates."""
    words = ("choose", "The sky is", "--choice", " blue", "--choice", " green", "--json")
    done = stoker(*words)
    assert done.stderr == asking("talker", server)
    assert json.loads(done.stdout) == json.loads(stoker(*words, "-m", "talker").stdout)


def test_images_are_read_by_the_running_server(server, tmp_path):
    """T4, V4: they travel as they are."""
    (tmp_path / "a.png").write_bytes(plain(40, 30))
    done = stoker("read", tmp_path / "a.png", "--ask", "What is it?", "-n", "4", "--json-lines")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(asking("talker", server))
    assert "40 x 30" in done.stderr
    assert json.loads(done.stdout)["value"]


def test_a_model_that_the_running_server_does_not_serve_is_loaded_here(server):
    """T4: it was found, not named, so it is left aside, and stderr says why."""
    done = stoker("run", "Hi", "-n", "4", "-m", "fake:id=other")
    assert done.exit_code == 0
    told = f"the server at {server.url} does not serve 'fake:id=other' (it serves: talker"
    assert told in done.stderr
    assert "; it is left aside\n" in done.stderr


def test_a_server_that_is_too_busy_to_answer_is_left_aside_aloud(server, monkeypatch):
    """T4: nobody loads a second copy of a model without knowing why."""
    monkeypatch.setattr(target, "_HEALTH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        entry = RunFile(url=url, pid=os.getppid(), version="1", started_at=2.0)
        with registered(EngineSettings().run_dir, entry):
            done = stoker("run", "Hi", "-n", "4")
    assert done.exit_code == 0
    assert done.stderr.startswith(f"stoker: the server at {url} is left aside: it did not answer within ")
    assert done.stderr.endswith(asking("talker", server))


def test_a_named_server_has_to_serve_what_is_asked(server):
    """T4: nothing is loaded here behind the back of who named a server."""
    done = stoker("run", "Hi", "-m", "other", "--url", server.url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"stoker: the server at {server.url} does not serve 'other' (it serves: talker, embedder);"
        " stoker load has it serve more, and --no-server in place of --url loads a model here\n"
    )
    none = stoker("rerank", "q", "a", "b", "--url", server.url)
    assert none.exit_code == 2
    told = f"stoker: no model of the server at {server.url} ranks documents (it serves: talker, embedder)"
    assert none.stderr.startswith(told)


def test_what_only_a_model_here_can_have_leaves_the_server_aside(server):
    """T4: threads and backend are of a model that is loaded here; with --url they contradict it."""
    for flag, value in (("--threads", "1"), ("--backend", "fake")):
        done = stoker("run", "Hi", "-n", "4", "-m", "fake:", flag, value)
        assert done.exit_code == 0
        assert f"is left aside: {flag} is of a model that is loaded here" in done.stderr
    other = stoker("run", "Hi", "-m", "fake:", "--backend", "llama")
    assert (other.exit_code, "llama does not read fake:" in other.stderr) == (2, True)
    both = stoker("run", "Hi", "--threads", "1", "--url", server.url)
    assert (both.exit_code, both.stderr.count("\n")) == (2, 1)


def test_a_load_names_what_is_to_compute(server):
    """K8: the server's rule decides, and says why not."""
    assert stoker("load", "talker", "--backend", "fake").exit_code == 0
    other = stoker("load", "talker", "--backend", "llama")
    assert other.exit_code == 2
    assert "llama does not read fake:" in other.stderr


def test_a_suspended_server_is_not_waited_for(server):
    """T4: the command ends with what wakes it, instead of waiting for somebody who does."""
    assert stoker("suspend").exit_code == 0
    try:
        done = stoker("run", "Hi")
        assert done.exit_code == 2
        assert "is suspended: stoker resume wakes it; --no-server loads a model here" in done.stderr
    finally:
        assert stoker("resume").exit_code == 0


@pytest.mark.long
def test_a_server_with_a_key_says_how_to_give_one(start_server, tmp_path):
    """T4: in one line, with the other way out where the server was only found."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    locked = start_server(api_key_file=keys)
    entry = RunFile(url=locked.url, pid=os.getppid(), version="1", started_at=2.0)
    with registered(EngineSettings().run_dir, entry):
        done = stoker("embed", "one")
    assert done.exit_code == 2
    assert "without a key: --api-key, or STOKER_API_KEY; --no-server loads a model here" in done.stderr
    assert "--no-server" not in stoker("embed", "one", "--url", locked.url).stderr


def test_lines_and_vectors_stay_beside_each_other(server):
    """T7: a blank line has no vector, so its place has a null; --skip-blank closes the gap."""
    done = stoker("embed", input="one\n\ntwo\n")
    first, blank, last = done.stdout.splitlines()
    assert (done.exit_code, blank) == (0, "null")
    assert [first, last] == stoker("embed", "one", "two").stdout.splitlines()
    assert "stoker: 1 line blank (2): null in place of a vector" in done.stderr
    assert stoker("embed", "--skip-blank", input="one\n\ntwo\n").stdout.splitlines() == [first, last]
    document = json.loads(stoker("embed", "--json", input="one\n\n").stdout)
    assert [each["embedding"] is None for each in document["data"]] == [False, True]
    assert stoker("embed", "one", " ").exit_code == 2
    assert "there are no texts" in stoker("embed", input="\n").stderr
