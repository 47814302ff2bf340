"""POST /v1/choose in front of a real runtime with the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHOICES = ["yes", "no", "", "perhaps"]
BODY = {"prompt": "is it so?", "choices": CHOICES}
MESSAGES = [{"role": "user", "content": "is it so?"}]


@pytest.fixture
def http(_fake: Any) -> Iterator[httpx.Client]:
    """A client of the server."""
    with httpx.Client(base_url=_fake.url, timeout=60) as client:
        yield client


def test_choices_come_best_first(http: httpx.Client) -> None:
    """SPEC I5: index, rank, choice, score and probability of each, and the usage."""
    found = http.post("/v1/choose", json=BODY).json()
    assert (found["object"], found["model"]) == ("list", "fake")
    assert [each["rank"] for each in found["data"]] == [0, 1, 2, 3]
    scores = [each["score"] for each in found["data"]]
    assert scores[:3] == sorted(scores[:3])
    assert found["data"][3] == {"index": 2, "rank": 3, "choice": "", "score": None, "probability": 0.0}
    assert sum(each["probability"] for each in found["data"]) == pytest.approx(1.0)
    assert all(CHOICES[each["index"]] == each["choice"] for each in found["data"])
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0


def test_calibration_changes_scores_and_a_repetition_does_not(http: httpx.Client) -> None:
    """SPEC D5: `calibrate` subtracts; the same body gets the same answer."""
    plain = http.post("/v1/choose", json=BODY).json()
    assert http.post("/v1/choose", json={**BODY, "service_tier": "flex"}).json() == plain
    calibrated = http.post("/v1/choose", json={**BODY, "calibrate": True}).json()
    assert {each["score"] for each in calibrated["data"]} != {each["score"] for each in plain["data"]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"choices": []}, "choices"),
        ({"choices": ["a"] * 257}, "choices"),
        ({"choices": ["a", "b" * 40_000]}, "choices"),
        ({"prompt": None}, "prompt"),
        ({"messages": MESSAGES}, "prompt"),
        ({"prompt": [70_000]}, "prompt"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    """SPEC I5: none or too many choices, one too long, both or neither of prompt and messages."""
    answer = http.post("/v1/choose", json={**BODY, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
