"""Frames between the front and the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import QueueFullError, error_from_info
from stoker.ipc import codec as wire
from stoker.ipc.codec import WireError, command_decoder, encode_command, encode_events, event_decoder
from stoker.ipc.commands import Cancel, Command, LoadModel, Submit
from stoker.ipc.events import Delta, Event, Failed, Hello, Logged, Reply
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.ipc.usage import TokenLogprob

EVENTS: list[Event] = [
    Hello(7),
    Delta(request_id="a", index=1, text="é🙂", token_ids=[1, 2**31], finish_reason=FinishReason.STOP),
    Delta(request_id="a", index=0, logprobs=[TokenLogprob(3, b"\xff", -0.5, [(4, b"\x00", -1.0)])]),
    Reply(call_id=3, value={"tokens": [1], "pieces": [b"\xff\xfe"]}),
    Logged(logger="stoker.engine", level=30, at=1.5, text="é"),
    Failed("b", QueueFullError("full", retry_after_s=2.0, bound=5).info()),
]


@given(cuts=st.lists(st.integers(min_value=1, max_value=40), min_size=1))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    """L3: whatever pieces the socket hands out, the same messages come out, in order."""
    data = encode_events(EVENTS) + encode_events([]) + encode_events(EVENTS[:1])
    decoder = event_decoder()
    found: list[list[Event]] = []
    at = 0
    for step in range(len(data)):
        size = cuts[step % len(cuts)]
        found += decoder.feed(data[at : at + size])
        at += size
    assert found == [EVENTS, [], EVENTS[:1]]


def test_commands_arrive_as_they_were_sent() -> None:
    """L3: a request with everything set is the same on the other side."""
    request = GenerateRequest(
        prompt=(1, 2),
        sampling=Sampling(logit_bias={5: -1.5}, seed=2**63),
        stop=("a", "b"),
        timeout_s=1.5,
        n=2,
    )
    commands: list[Command] = [
        LoadModel(ModelSpec(id="m", path="p")),
        Submit(request_id="a", request=request, generated=[[1], []], mirostat_mu=[1.5, None]),
        Cancel("a"),
    ]
    data = b"".join(map(encode_command, commands))
    assert list(command_decoder().feed(data)) == commands


def test_an_error_is_raised_as_itself_on_the_other_side() -> None:
    """L6: class, status and numbers cross the boundary."""
    (events,) = event_decoder().feed(encode_events(EVENTS))
    failed = events[-1]
    assert isinstance(failed, Failed)
    error = error_from_info(failed.error)
    assert isinstance(error, QueueFullError)
    assert (error.retry_after_s, error.details) == (2.0, {"bound": 5})


def test_a_frame_over_the_bound_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: before it is sent, and before it is believed."""
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="of 100") as caught:
        encode_command(Cancel("x" * 200))
    assert caught.value.details["max_bytes"] == 100
    with pytest.raises(WireError, match="101 bytes"):
        list(event_decoder().feed((101).to_bytes(4, "little")))


@pytest.mark.parametrize("body", [b"\xc1", b"\x93\x01", b"\x91\x81\xa4type\xa4Nope"])
def test_a_frame_that_is_no_message_is_refused(body: bytes) -> None:
    """L6: garbage is a typed error, not a half-read stream."""
    with pytest.raises(WireError, match="cannot be read"):
        list(event_decoder().feed(len(body).to_bytes(4, "little") + body))
