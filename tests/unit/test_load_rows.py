"""Loads of models among the requests: how far they are, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.client.requests.load_rows import LoadRows


class Told:
    """What subscribers are told, and the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.all: list[tuple[str, str, dict[str, Any]]] = []
        self.rows = LoadRows(lambda *told: self.all.append(told), lambda: self.now)

    def moved(self, state: str, stage: str = "", fraction: float = 0.0, **more: Any) -> None:
        """The model reports; a tenth of a second passes."""
        how_far = {"stage": stage, "fraction": fraction} if stage else {}
        self.rows.take({"model": "m", "state": state, **how_far, **more})
        self.now += 0.1

    @property
    def whats(self) -> list[str]:
        """What happened, in order."""
        return [what for _, what, _ in self.all]


@pytest.fixture
def told() -> Told:
    """Nobody has reported yet."""
    return Told()


def test_a_load_is_a_row_until_it_has_ended(told: Told) -> None:
    """SPEC O20: stage and fraction, twice a second; nothing of a model that is just there."""
    told.moved("ready")
    told.moved("loading", "waiting")
    for hundredth in range(10):
        told.moved("loading", "weights", hundredth / 10)
    (row,) = told.rows.rows()
    assert (row.request_id, row.kind, row.stage, row.fraction) == ("load:m", "load", "weights", 0.9)
    assert row.end_to_end_s == pytest.approx(1.1)
    told.moved("ready")
    assert told.rows.rows() == []
    assert told.whats == ["arrived", "load_progress", "load_progress", "load_progress", "finished"]
    assert told.all[-1][2]["finish_reason"] == "stop"


def test_a_load_that_is_stopped_or_fails_says_so(told: Told) -> None:
    """SPEC O20: and a download that is done is no load that was stopped."""
    told.moved("loading")
    told.moved("absent")
    told.moved("loading")
    told.moved("failed", error={"code": "model_load_failed", "message": "no"})
    told.moved("downloading", "file.gguf", 0.5)
    told.moved("absent")
    ends = [(what, fields["finish_reason"]) for _, what, fields in told.all if what in {"finished", "failed"}]
    assert ends == [("finished", "cancelled"), ("failed", None), ("finished", "stop")]
    assert told.all[-4][2]["error"]["code"] == "model_load_failed"
