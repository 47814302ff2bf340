"""The figures of how honest estimates of waiting are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from bench import eta_accuracy, session
from bench.eta_accuracy import Estimate, honesty

from stoker.ipc.request import Priority


def estimate(eta_s: float | None, real_s: float, **fields: object) -> Estimate:
    """One that was told on arrival."""
    given = {"crowd": "people", "machine": "quiet", "priority": "interactive", "is_first": True} | fields
    return Estimate(eta_s=eta_s, real_s=real_s, **given)  # type: ignore[arg-type] - fields of tests


@pytest.mark.parametrize(("eta_s", "real_s"), [(2.0, 4.0), (8.0, 4.0), (0.0, 0.9)])
def test_an_estimate_is_right_within_a_factor_of_two_or_where_both_are_short(
    eta_s: float, real_s: float
) -> None:
    """What a client is told holds within a factor of two (D12)."""
    assert estimate(eta_s, real_s).is_right


@pytest.mark.parametrize(("eta_s", "real_s"), [(1.9, 4.0), (8.1, 4.0), (None, 0.1), (0.0, 1.1)])
def test_an_estimate_that_is_off_by_more_or_was_not_given_is_wrong(
    eta_s: float | None, real_s: float
) -> None:
    """What a client is told holds within a factor of two (D12)."""
    assert not estimate(eta_s, real_s).is_right


def test_estimates_are_counted_by_machine_class_and_moment() -> None:
    """So that one kind does not hide another (D12)."""
    found = [estimate(2.0, 3.0), estimate(2.0, 9.0), estimate(2.0, 9.0, is_first=False, machine="busy")]
    assert [(row.machine, row.when, row.num_right, row.num_estimates) for row in honesty(found)] == [
        ("busy", "while waiting", 0, 1),
        ("quiet", "on arrival", 1, 2),
    ]


def test_the_report_shows_the_share_that_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure a kind, with a tenth as its limit (D12)."""
    row = {
        "machine": "busy",
        "priority": "background",
        "when": "on arrival",
        "num_right": 15,
        "num_estimates": 20,
    }
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps([row])}\n", "")

    monkeypatch.setattr(session.subprocess, "run", run)
    (figure,) = session.measure_estimates(Path("m.gguf"), range(3, 5))
    assert (figure.key, figure.value, figure.is_good) == ("eta_busy_background_on_arrival", 25.0, False)
    assert commands[0][1:] == [
        *("-m", "bench.eta_accuracy", "--json", "--model", "m.gguf", "--seed", "3", "--repeat", "2"),
    ]


async def test_every_crowd_is_asked_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the deterministic backend, whose steps take no time; each who asks is told something (D12)."""
    for name in ("SETTLE_S", "BETWEEN_S"):
        monkeypatch.setattr(eta_accuracy, name, 0.0)
    monkeypatch.setattr(eta_accuracy, "busy_process", eta_accuracy.nullcontext)
    found = await eta_accuracy.estimates(Path("fake:eog_period=0"), 1)
    assert {(one.machine, one.crowd) for one in found} == {
        (machine, crowd) for machine in eta_accuracy.MACHINES for crowd in eta_accuracy.CROWDS
    }
    assert {one.priority for one in found} == set(Priority)
    num_asked = len(eta_accuracy.MACHINES) * sum(
        len(eta_accuracy.crowd_of(name)) for name in eta_accuracy.CROWDS
    )
    assert sum(one.is_first for one in found) == num_asked
