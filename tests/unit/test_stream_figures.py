"""What every token of a stream passes in the front: the frame that it leaves in, the times between them."""

from __future__ import annotations

import json

import pytest

from stoker.ipc.codec import WireError, encode_events, event_decoder
from stoker.ipc.events import Delta, Goodbye, Hello
from stoker.ipc.request import FinishReason
from stoker.server.metrics.metrics import MAX_GAPS, Metrics
from stoker.server.openai.answers import Head
from stoker.server.openai.chat import ChatChunks
from stoker.server.openai.completions import TextChunks

ODD = 'a "content":"" \\ \n \u2028 é 🙂 "text":""'
COUNT = b"stoker:inter_token_latency_seconds_count %.1f\n"


def delta(text: str, index: int = 0, reason: FinishReason | None = None) -> Delta:
    """A delta of one token."""
    return Delta(request_id="r", index=index, text=text, token_ids=[1], finish_reason=reason)


@pytest.mark.parametrize("writes", [ChatChunks, lambda head: TextChunks(head, 1)])
def test_a_text_is_written_as_the_one_that_ends_is(writes) -> None:
    """S2: whatever is in texts and names; all fields of a chunk are the same but its text and its reason."""
    head = Head(id=ODD, model=ODD, n=2, wants_usage=True)
    writer = writes(head)
    writer.write(0, delta("first", index=1))
    frame = writer.write(0, delta(ODD, index=1))
    ending = writer.write(0, delta(ODD, index=1, reason=FinishReason.LENGTH))
    assert frame.startswith(b"data: {")
    assert frame.endswith(b"}\n\n")
    assert ending.startswith(frame)
    (choice,) = json.loads(frame.removeprefix(b"data: "))["choices"]
    assert choice["index"] == 1
    assert choice.get("text", choice.get("delta", {}).get("content")) == ODD


def test_times_between_tokens_are_told_while_a_stream_runs_and_counted_once() -> None:
    """O1: what a stream keeps is counted when figures are read, when it is much, and when it ends."""
    metrics = Metrics()
    with metrics.request("chat") as meter:
        for _ in range(3):
            meter.note(delta("x"))
        assert COUNT % 2 in metrics.render(None)
        for _ in range(MAX_GAPS + 1):
            meter.note(delta("x"))
        assert COUNT % (MAX_GAPS + 3) in metrics.render(None)
        meter.note(delta("x"))
    assert COUNT % (MAX_GAPS + 4) in metrics.render(None)


def test_a_whole_frame_is_read_as_its_pieces_are() -> None:
    """L3: also behind a piece of another one; a whole one that is no frame of events is an error."""
    events = [Hello(7), delta(ODD)]
    frame = encode_events(events)
    decoder = event_decoder()
    assert list(decoder.feed(frame)) == [events]
    assert list(decoder.feed(frame[:9])) == []
    assert list(decoder.feed(frame[9:] + encode_events([Goodbye()]))) == [events, [Goodbye()]]
    assert list(decoder.feed(frame)) == [events]
    with pytest.raises(WireError, match="cannot be read"):
        list(decoder.feed(frame[:4] + bytes(len(frame) - 4)))
