"""The client of a crowd, and the load on the process in front of an engine."""

from __future__ import annotations

import json

import pytest
from bench import front_load
from bench.client import Completion
from bench.crowd_client import read_crowd
from bench.errors import BenchError
from bench_stand_in import StandIn, serving

ASKED = [Completion(prompt="hello", max_tokens=count) for count in (1, 5, 40)]


class Silent(StandIn):
    """Ends after a comment."""

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        return [b": hi\n\n"]


async def test_a_crowd_is_read_by_its_first_event_and_its_usage() -> None:
    """S2: whatever the pieces are; every stream has its own count and times that never run backwards."""
    async with serving(StandIn()) as url:
        answers = await read_crowd(url, ASKED, "m")
    assert [answer.num_tokens for answer in answers] == [1, 5, 40]
    for answer in answers:
        assert answer.num_prompt_tokens == 7
        assert answer.sent_s <= answer.first_s <= answer.last_s
        assert answer.ttft_s == answer.first_s - answer.sent_s


@pytest.mark.parametrize(
    ("stand_in", "words"),
    [
        (Silent(tail="cut"), "was cut"),
        (StandIn(tail="error"), "out of cells"),
        (StandIn(status=503), "no such thing"),
    ],
)
async def test_a_broken_stream_of_a_crowd_is_an_error(stand_in: StandIn, words: str) -> None:
    """S2: nothing is counted that did not come to its end."""
    async with serving(stand_in) as url:
        with pytest.raises(BenchError, match=words):
            await read_crowd(url, ASKED[:1], "m")


@pytest.mark.long
def test_the_front_is_measured_with_an_engine_that_computes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: every token of every stream comes, and each process's time is told by it."""
    monkeypatch.setattr(front_load, "NUM_CROWDS", 1)
    assert front_load.main(["--rate", "4000", "--streams", "4", "--tokens", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked_per_s"] == 4000
    assert 0 < found["tokens_per_s"] < 40_000
    assert found["first_token_ms"] > 0


@pytest.mark.long
def test_the_front_is_measured_before_the_real_engine_where_a_model_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: the streams are chats, as many crowds are read as were asked for, what requests cost is apart."""
    monkeypatch.setattr(front_load, "NUM_CROWDS", 1)
    command = ["--model", "fake:id=front", "--streams", "2", "--tokens", "20", "--repeat", "3", "--json"]
    assert front_load.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked_per_s"] == 0
    assert found["tokens_per_s"] > 0
    assert found["request_us"] > found["front_us"]


@pytest.mark.long
def test_a_gate_is_measured_before_servers_whose_engines_compute_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: the front is the gate's process alone, what the servers behind it take is told apart."""
    monkeypatch.setattr(front_load, "NUM_CROWDS", 1)
    command = ["--gate", "2", "--rate", "4000", "--streams", "4", "--tokens", "20", "--json"]
    assert front_load.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["tokens_per_s"] < 40_000
    assert found["servers_us"] > 0
    assert found["engine_us"] > 0
    assert found["request_us"] > 0
