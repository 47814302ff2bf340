"""An engine's process may begin before there is a runtime: what it imports it imports beside the caller."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from test_supervisor import MODEL, kill, serving

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
    await host.close(0.0)


def test_an_engine_that_nobody_started_ends_with_the_block() -> None:
    """L10: a port in use, or a wrong key file, leaves no process behind."""
    with spawned_ahead(EngineSettings()) as ahead:
        assert ahead is not None
        child = psutil.Process(ahead.pid)
        assert child.is_running()
    assert not child.is_running()


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
