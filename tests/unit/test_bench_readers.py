"""The bench of readers of events: a server of its own, measured while nobody and somebody reads."""

from __future__ import annotations

import json

import pytest
from bench import event_readers


async def test_each_number_of_readers_is_measured_beside_the_same_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SPEC O21: tokens in any case, events only where somebody reads."""
    monkeypatch.setattr(event_readers, "SETTLE_S", 0.0)
    nobody, two = await event_readers.measure([0, 2], rounds=1, seconds=0.6)
    assert [nobody.num_readers, two.num_readers] == [0, 2]
    assert min(nobody.tokens_per_second, two.tokens_per_second) > 0
    assert (nobody.events_per_second, two.events_per_second > 0) == (0.0, True)
    assert min(nobody.front_ms, two.front_ms, nobody.engine_ms, two.engine_ms) >= 0


def test_a_server_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said in a line, and the exit code says it too."""
    monkeypatch.setattr(event_readers, "MODEL", "no-such-model")
    assert event_readers.main(["--json"]) == 1
    assert "the server ended before it was ready" in capsys.readouterr().err


def test_figures_are_a_line_each_and_json_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Milliseconds of a second, tokens, events."""

    async def measured(*_: object) -> list[event_readers.ReadersCost]:
        return [event_readers.ReadersCost(100, 60.0, 39.9, 337.4, 7.7)]

    monkeypatch.setattr(event_readers, "measure", measured)
    assert event_readers.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["100", "60.0", "39.9", "337.4", "7.7"]
    assert event_readers.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_readers"] == 100
