"""Lines of the log: what they say, in which form, and that a command shows none unasked."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.logs import JournalFormatter, JsonFormatter
from stoker.server.log import request_line

ENDED: dict[str, Any] = {
    "what": "finished",
    "request_id": "a",
    "model": "m",
    "priority": "interactive",
    "kind": "chat",
    "prompt_tokens": 34,
    "cached_tokens": 0,
    "completion_tokens": 60,
    "first_token_s": 0.123,
    "tokens_per_second": 45.34,
    "num_parks": 0,
    "parked_s": 0.0,
    "waited_for": "",
    "finish_reason": "stop",
}
REFUSED = {
    "what": "failed",
    "first_token_s": None,
    "tokens_per_second": None,
    "completion_tokens": 0,
    "error": {"code": "queue_full", "message": "no place\nleft \x1b[2J"},
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "interactive   34 in   60 out  0.12 s  45/s stop m"),
        (
            {
                "tokens_per_second": 0.84,
                "first_token_s": 12.34,
                "cached_tokens": 30,
                "waited_for": "a free slot",
            },
            "interactive   34 in   60 out    12 s 0.8/s stop m; 30 from the cache; waited: a free slot",
        ),
        (
            {"priority": "background", "num_parks": 2, "parked_s": 1.5},
            "background    34 in   60 out  0.12 s  45/s stop m; gave way 1.50 s",
        ),
        (
            {"kind": "embed", "first_token_s": None, "tokens_per_second": None, "completion_tokens": 0},
            "interactive   34 in    0 out               embed m",
        ),
        (REFUSED, "interactive   34 in    0 out               queue_full: no place left  [2J m"),
    ],
)
def test_a_request_that_ended_is_one_line(changes: dict[str, Any], line: str) -> None:
    """T12: class, tokens, first token, speed, end, model, waits; text of others steers no terminal."""
    assert request_line(ENDED | changes) == line


def record(level: int, text: str, **more: Any) -> logging.LogRecord:
    """A record of a moment that is known."""
    fields = {"name": "stoker.x", "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    return logging.makeLogRecord(fields | {"created": 1.25, "msecs": 250.0} | more)


def test_json_has_time_level_logger_message_and_figures() -> None:
    """T13: `--log-format json`; one line whatever the message holds."""
    error = ValueError("why")
    given = record(logging.ERROR, "a\nb", fields={"model": "m"}, exc_info=(type(error), error, None))
    line = JsonFormatter().format(given)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.250Z",
        "level": "error",
        "logger": "stoker.x",
        "message": "a b",
        "model": "m",
        "traceback": "ValueError: why",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 3)],
)
def test_the_journal_reads_a_priority_before_each_line(level: int, priority: int) -> None:
    """T13: sd-daemon(3)'s numbers, also for what comes after a line's end."""
    formatted = JournalFormatter("%(message)s").format(record(level, "a\nb"))
    assert formatted == f"<{priority}>a\n<{priority}>b"


@pytest.mark.long
def test_a_command_shows_the_engines_warnings_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """T13: `run` says one line; `--log-level` shows the log besides, `--log-file` keeps it."""
    file = tmp_path / "x.log"
    own = {name: str(tmp_path) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")}

    def said(*options: str) -> list[str]:
        argv = [
            sys.executable,
            "-m",
            "stoker.cli",
            "run",
            "-m",
            "fake:load_fails=1",
            "--no-server",
            *options,
            "hi",
        ]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, env=os.environ | own
        )
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.splitlines()

    (alone,) = said()
    assert alone == "stoker: a load that fails was ordered"
    log_line, last = said("--log-level", "warning")
    assert last == alone
    assert "WARNING stoker.engine.residency.residency: fake could not be loaded" in log_line
    assert said("--log-file", str(file)) == [alone]
    assert "WARNING stoker.engine.residency.residency" in file.read_text(encoding="utf-8")
