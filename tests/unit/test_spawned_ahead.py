"""An engine's process may begin before there is a runtime: what it imports it imports beside the caller."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_supervisor import MODEL, kill, serving

from stoker.cli import main
from stoker.cli.exits import ExitCode
from stoker.client.process.child import EngineChild
from stoker.client.process.transport import ProcessTransport, spawned_ahead
from stoker.client.supervisor import EngineSupervisor
from stoker.ipc.commands import Tokenize
from stoker.settings import EngineSettings


@pytest.fixture(autouse=True)
def _stand_in_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


async def test_a_supervisor_goes_on_with_the_engine_that_was_spawned_before_it() -> None:
    """L10: the first engine is that process; the next one is made as ever."""
    first = ProcessTransport(EngineSettings(), "scripted_engine")
    first.spawn()
    made: list[ProcessTransport] = []

    def new_transport(settings: EngineSettings) -> ProcessTransport:
        made.append(ProcessTransport(settings, "scripted_engine"))
        return made[-1]

    host = EngineSupervisor(serving(MODEL), new_transport=new_transport, first=first)
    await host.start()
    assert host.pid == first.pid
    assert made == []
    kill(host)
    assert (await host.ask(Tokenize(call_id=0, model="m", text="hi")))["tokens"] == [104, 105]
    assert [transport.pid for transport in made] == [host.pid]
    assert host._new_process(EngineSettings())._num_restarts == 1, "it would warm what may have ended it"
    await host.close(0.0)


def test_an_engine_that_nobody_started_ends_with_the_block() -> None:
    """L10: a port in use, or a wrong key file, leaves no process behind."""
    with spawned_ahead(EngineSettings()) as ahead:
        assert ahead is not None
        child = psutil.Process(ahead.pid)
        assert child.is_running()
    assert not child.is_running()


def test_ctrl_c_during_the_imports_ends_the_program_and_its_engine_without_a_traceback(monkeypatch):
    """L10: exit code 130, as while a command runs."""

    class Interrupted:
        """A module whose import Ctrl-C ends."""

        def __getattr__(self, _name):
            raise KeyboardInterrupt

    child = EngineChild("scripted_engine")
    monkeypatch.setattr(main, "_spawned", lambda _models: child)
    monkeypatch.setattr(sys, "argv", ["stoker", "serve"])
    monkeypatch.setitem(sys.modules, "stoker.cli.app", Interrupted())
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == ExitCode.INTERRUPTED
    assert child.process.poll() is not None


def test_an_engine_in_a_thread_has_no_process_ahead() -> None:
    """L10: there is nothing to begin."""
    with spawned_ahead(EngineSettings(isolation="thread")) as ahead:
        assert ahead is None


def test_a_process_that_the_machine_refuses_is_left_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """L9: which tries again and says why."""

    def refuse(*_args: object, **_how: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with spawned_ahead(EngineSettings()) as ahead:
        assert ahead is not None
        assert ahead.pid == 0


def test_a_command_spawns_the_engine_before_it_knows_its_settings() -> None:
    """L10: the block goes on with that process, which has imported its share; it ends with the block."""
    child = EngineChild("scripted_engine")
    with spawned_ahead(EngineSettings(), child) as ahead:
        assert ahead is not None
        assert ahead.pid == child.process.pid
        assert child.process.poll() is None
    assert child.process.returncode is not None


def test_an_engine_spawned_for_settings_that_want_a_thread_is_ended_at_once() -> None:
    """L10: what the file of settings says is read later than the command line."""
    child = EngineChild("scripted_engine")
    with spawned_ahead(EngineSettings(isolation="thread"), child) as ahead:
        assert ahead is None
        assert child.process.returncode is not None


def test_an_engine_that_is_never_told_how_to_run_leaves_by_itself() -> None:
    """L10: its command was killed; nothing is said, and the status is 0."""
    child = EngineChild("scripted_engine")
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait(60) == 0
    assert os.read(child.output, 1) == b""
    child.close()


@pytest.mark.parametrize(
    ("words", "is_spawned"),
    [
        (["serve"], True),
        (["serve", "--port", "0", "-m", "chat.gguf"], True),
        (["serve", "--help"], False),
        (["serve", "-h"], False),
        (["serve", "--isolation=thread"], False),
        (["serve", "--isolation", "process"], False),
        (["run", "serve"], False),
        (["--version"], False),
        ([], False),
    ],
)
def test_only_a_server_has_an_engine_before_its_command_is_imported(
    words: list[str], *, is_spawned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L10: other commands may have none to start, and a thread needs none."""
    monkeypatch.delenv("STOKER_ISOLATION", raising=False)
    assert main._is_server(words) == is_spawned
    monkeypatch.setenv("STOKER_ISOLATION", "thread")
    assert not main._is_server(words)


def test_a_server_that_cannot_be_started_leaves_no_engine(tmp_path: Path) -> None:
    """L10, S7: its settings are wrong; the engine that was spawned for them is gone with the command."""
    watched = (
        "import sys\nfrom stoker.cli import main\nfrom stoker.client.process import child\n"
        "spawn = child.EngineChild.__init__\n"
        "def told(self, **given):\n    spawn(self, **given)\n    print(self.process.pid, flush=True)\n"
        "child.EngineChild.__init__ = told\n"
        f"sys.argv = ['stoker', 'serve', '--config', {str(tmp_path / 'none.toml')!r}]\nmain.main()"
    )
    program = [sys.executable, "-c", watched]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "none.toml" in done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_an_engine_is_told_the_models_that_its_command_line_names(tmp_path: Path) -> None:
    """L10: files only; what else a name means the settings say later."""
    files = [tmp_path / "chat.gguf", tmp_path / "embedder.gguf"]
    for file in files:
        file.touch()
    chat, embedder = map(str, files)
    assert main._models_in(["serve", "-m", chat, "--port", "0", f"--model={embedder}"]) == [chat, embedder]
    assert main._models_in(["serve", "-m", str(tmp_path), "--model", "listed-name", "-m"]) == []
