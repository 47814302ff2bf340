"""The engine process's log reaches this process's log, and nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from stoker.client.process.log_relay import relay, wanted_level
from stoker.engine.process import LogToClient
from stoker.errors import StokerError
from stoker.ipc.events import Event, Logged
from stoker.runtime import Runtime

PROGRAM = """
import logging, sys
import stoker
if sys.argv[1:]:
    logging.basicConfig(format="%(levelname)s %(name)s %(processName)s: %(message)s")
for model in ("fake:load_fails=1", "fake:load_aborts=1"):
    try:
        stoker.sync.Runtime(model).__enter__()
    except stoker.StokerError:
        pass
"""


def said_by(*arguments: str) -> str:
    """What a program whose engine warns and crashes has on its stderr."""
    argv = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    return done.stderr


async def test_a_warning_of_the_engine_is_a_record_with_its_logger_level_and_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """T13: As if it had been logged here."""
    runtime = Runtime("fake:load_fails=1")
    with pytest.raises(StokerError):
        await runtime.start()
    (record,) = [each for each in caplog.records if "could not be loaded" in each.message]
    assert record.name == "stoker.engine.residency.residency"
    assert (record.levelno, record.processName) == (logging.WARNING, "engine")
    assert record.process != logging.makeLogRecord({}).process
    assert abs(record.created - caplog.records[-1].created) < 60


def test_the_terminal_of_a_program_that_configures_no_log_stays_clean() -> None:
    """T13: Neither warnings of the engine nor what native code prints as it dies."""
    assert said_by() == ""


@pytest.mark.long
def test_a_program_that_configures_its_log_gets_the_engines_too() -> None:
    """T13: Its warnings, and what native code prints, line by line."""
    lines = said_by("shown").splitlines()
    assert [line for line in lines if line.startswith("WARNING stoker.engine.residency.residency engine: ")]
    assert "WARNING stoker.engine.output MainProcess: fake.cpp:1: ASSERT(!load_aborts) failed" in lines


def test_the_level_that_is_wanted_is_the_lowest_of_all_our_loggers() -> None:
    """T13: A program that asks one logger for more gets it, also from the engine."""
    before = wanted_level()
    one = logging.getLogger("stoker.engine.threads.controller")
    one.setLevel(logging.DEBUG)
    try:
        assert wanted_level() == logging.DEBUG
    finally:
        one.setLevel(logging.NOTSET)
    assert wanted_level() == before


def test_a_record_below_its_loggers_level_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """T13: The engine sends what any logger wants; each takes only its own."""
    with caplog.at_level(logging.INFO, "stoker.one"):
        relay(Logged(logger="stoker.one", level=logging.INFO, at=5.25, text="kept"), pid=7)
        relay(Logged(logger="stoker.one", level=logging.DEBUG, at=5.5, text="dropped"), pid=7)
    assert [(each.message, each.created, each.process) for each in caplog.records] == [("kept", 5.25, 7)]


def test_other_packages_of_the_engine_log_below_our_name() -> None:
    """T13: Who filters by `stoker` gets everything; a traceback travels with its message."""
    sent: list[Event] = []
    handler = LogToClient(sent.extend)
    error = ValueError("why")
    trace = (type(error), error, None)
    handler.handle(logging.LogRecord("PIL.Image", logging.ERROR, "", 0, "failed %d", (3,), trace))
    (event,) = sent
    assert isinstance(event, Logged)
    assert event.logger == "stoker.engine.PIL.Image"
    assert event.text.splitlines() == ["failed 3", "ValueError: why"]


def test_a_record_waits_for_no_lock_but_the_writers() -> None:
    """T13: Two locks, one taken by a finaliser in the middle of a write, could hold the engine up."""
    sent: list[Event] = []
    handler = LogToClient(sent.extend)
    record = logging.LogRecord("stoker.x", logging.WARNING, "", 0, "said", (), None)
    handler.acquire()
    try:
        thread = threading.Thread(target=handler.handle, args=(record,), daemon=True)
        thread.start()
        thread.join(10)
        assert [event.text for event in sent if isinstance(event, Logged)] == ["said"]
    finally:
        handler.release()
