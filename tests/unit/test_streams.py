"""The bounded stream of one request."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from stoker.client.requests.stream import MAX_WAITING, RequestStream, StreamEvent
from stoker.errors import QueueFullError
from stoker.ipc.events import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    Queued,
    Resumed,
)
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource, Timings, TokenLogprob, Usage

FINISHED = Finished(request_id="r", usage=Usage(completion_tokens=3), timings=Timings())


def stream_of(*events: Event) -> tuple[RequestStream, list[str]]:
    """A stream that these were pushed to, and who was abandoned."""
    abandoned: list[str] = []
    stream = RequestStream(lambda: abandoned.append("r"))
    for event in events:
        stream.push(event)
    return stream, abandoned


def token(number: int, index: int = 0) -> Delta:
    """A delta of one token."""
    logprob = TokenLogprob(number, b"", -1.0, [])
    return Delta(request_id="r", index=index, text=f"{number} ", token_ids=[number], logprobs=[logprob])


async def test_a_stream_ends_after_its_terminal_event() -> None:
    """L6: Finished is the last item, and what comes after it is ignored."""
    stream, abandoned = stream_of(Queued("r", 0), token(1), FINISHED, token(2), FINISHED)
    assert [event async for event in stream] == [Queued("r", 0), token(1), FINISHED]
    assert [event async for event in stream] == []
    await stream.aclose()
    assert abandoned == []


def one_of_several(number: int, pause_s: float) -> Delta:
    """A delta of a token after which its step has given another."""
    return structs.replace(token(number), pause_s=pause_s)


LONG_S = 3600.0


async def waits(reading: asyncio.Task[StreamEvent]) -> bool:
    """Whether it has read nothing once all that could go on went on."""
    await asyncio.wait([reading], timeout=0.02)
    return not reading.done()


@pytest.mark.parametrize("newer", [token(9), one_of_several(9, LONG_S), Paused("r"), FINISHED])
async def test_tokens_of_one_step_are_read_one_after_the_other_until_something_newer_comes(
    newer: Event,
) -> None:
    """D13: the first at once; what a step or the end brings is not held up by them."""
    first, second, third = one_of_several(1, LONG_S), one_of_several(2, LONG_S), token(3)
    stream, _ = stream_of(token(0), first, second, third)
    assert [await anext(stream), await anext(stream)] == [token(0), first]
    reading = asyncio.ensure_future(anext(stream))
    assert await waits(reading)
    stream.push(newer)
    if isinstance(newer, Delta) and newer.pause_s:
        stream.push(token(10))
    assert [await reading, await anext(stream), await anext(stream)] == [second, third, newer]


async def test_the_next_token_of_a_step_is_read_when_it_is_due() -> None:
    """D13: with nothing newer, as where the next step takes longer; and one step after the other."""
    stream, _ = stream_of(one_of_several(1, 0.002), one_of_several(2, 0.002), token(3))
    assert [await anext(stream) for _ in range(3)] == [
        one_of_several(1, 0.002),
        one_of_several(2, 0.002),
        token(3),
    ]
    stream.push(one_of_several(4, LONG_S))
    stream.push(token(5))
    assert await anext(stream) == one_of_several(4, LONG_S)
    reading = asyncio.ensure_future(anext(stream))
    assert await waits(reading)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_who_reads_late_gets_what_is_due_at_once() -> None:
    """D13, L6: of two steps that wait nothing is held, merged or not; of the last one it is."""
    steps = [(one_of_several(2 * step, LONG_S), token(2 * step + 1)) for step in range(MAX_WAITING)]
    stream, _ = stream_of(*(delta for step in steps for delta in step))
    deltas = [await anext(stream) for _ in range(len(stream._waiting))]
    assert [n for d in deltas if isinstance(d, Delta) for n in d.token_ids] == [*range(2 * MAX_WAITING)]
    for event in (one_of_several(1, LONG_S), token(2)):
        stream.push(event)
    assert await anext(stream) == one_of_several(1, LONG_S)
    reading = asyncio.ensure_future(anext(stream))
    assert await waits(reading)
    stream.push(FINISHED)
    assert [await reading, await anext(stream)] == [token(2), FINISHED]


async def test_what_comes_in_place_of_a_steps_last_token_is_told_at_once() -> None:
    """D13, L6: a notice, or the failure of the step."""
    first, second = one_of_several(1, LONG_S), one_of_several(2, LONG_S)
    stream, _ = stream_of(first, second, Paused("r"))
    assert [await anext(stream) for _ in range(3)] == [first, second, Paused("r")]
    for event in (first, second, Failed("r", QueueFullError("full").info())):
        stream.push(event)
    assert [await anext(stream), await anext(stream)] == [first, second]
    with pytest.raises(QueueFullError, match="full"):
        await anext(stream)


async def test_a_failure_is_raised_after_what_was_delivered() -> None:
    """L6: the caller gets the text, then the engine's own error."""
    stream, _ = stream_of(token(1), Failed("r", QueueFullError("full").info()))
    assert await anext(stream) == token(1)
    with pytest.raises(QueueFullError, match="full"):
        await anext(stream)
    assert [event async for event in stream] == []


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    """L6: past the bound deltas of a choice join; texts, ids and logprobs stay in order."""
    numbers = range(10 * MAX_WAITING)
    stream, _ = stream_of(*(token(number, number % 2) for number in numbers))
    last = Delta(request_id="r", index=0, text="end", finish_reason=FinishReason.STOP, stop_text="s")
    stream.push(last)
    stream.push(FINISHED)
    assert len(stream._waiting) <= MAX_WAITING + 2
    deltas = [event async for event in stream if isinstance(event, Delta)]
    for index in (0, 1):
        mine = [delta for delta in deltas if delta.index == index]
        expected = list(numbers)[index::2]
        assert [token for delta in mine for token in delta.token_ids] == expected
        assert "".join(d.text for d in mine) == "".join(f"{n} " for n in expected) + (
            "end" if not index else ""
        )
        assert [p.token_id for d in mine for p in d.logprobs or []] == expected
    merged = [delta for delta in deltas if delta.index == 0][-1]
    assert (merged.finish_reason, merged.stop_text) == (FinishReason.STOP, "s")


async def test_a_reader_that_catches_up_gets_single_deltas_again() -> None:
    """L6: a run that was read is not added to any more."""
    stream, _ = stream_of(*(token(number) for number in range(MAX_WAITING + 1)))
    read = [await anext(stream) for _ in range(MAX_WAITING)]
    stream.push(token(9999))
    assert isinstance(read[-1], Delta)
    assert read[-1].token_ids == [MAX_WAITING - 1, MAX_WAITING]
    assert await anext(stream) == token(9999)


async def test_progress_replaces_progress() -> None:
    """S2: only the newest count waits."""
    stream, _ = stream_of(
        *(PrefillProgress(request_id="r", total=9, cached=0, processed=i, time_ms=1.0) for i in range(5)),
        FINISHED,
    )
    first = await anext(stream)
    assert isinstance(first, PrefillProgress)
    assert first.processed == 4
    assert await anext(stream) == FINISHED


async def test_a_place_in_the_line_replaces_the_one_before_it() -> None:
    """Q14: what waits to be read is the newest one."""
    stream, _ = stream_of(Queued("r", 5), Queued("r", 3, 7.0), token(1), Queued("r", 2))
    assert [await anext(stream) for _ in range(3)] == [Queued("r", 3, 7.0), token(1), Queued("r", 2)]


async def test_interruptions_are_told_in_their_order() -> None:
    """Q4, Q17: between the tokens they fell between."""
    parked = Parked(request_id="r", index=0, form="cells", reason="interactive")
    events = [token(1), parked, Queued("r", 0), token(2), Paused("r"), Resumed("r"), token(3), FINISHED]
    stream, _ = stream_of(*events)
    assert [event async for event in stream] == events


async def test_the_first_admission_is_told_and_no_other() -> None:
    """C13: what the prompt found then counts; a choice that comes back and a fresh engine say it again."""
    first = Admitted("r", 640, CacheSource.RAM)
    again = [Admitted("r"), Admitted("r", 64, CacheSource.LIVE)]
    stream, _ = stream_of(Queued("r", 0), first, again[0], token(1), again[1], token(2), FINISHED)
    events = [event async for event in stream]
    assert events == [Queued("r", 0), first, token(1), token(2), FINISHED]


async def test_an_admission_without_cached_tokens_counts_as_the_first() -> None:
    """C13: a miss is a finding too."""
    stream, _ = stream_of(Admitted("r"), Admitted("r", 64, CacheSource.LIVE), FINISHED)
    assert [event async for event in stream] == [Admitted("r"), FINISHED]


async def test_a_slow_reader_is_told_the_newest_interruption_only() -> None:
    """Q17: pausing again and again fills nobody's memory."""
    stream, _ = stream_of(*(token(number) for number in range(MAX_WAITING)))
    for _ in range(10 * MAX_WAITING):
        stream.push(Paused("r"))
        stream.push(Resumed("r"))
    assert len(stream._waiting) == MAX_WAITING + 1
    stream.push(token(MAX_WAITING))
    stream.push(FINISHED)
    events = [event async for event in stream]
    assert [event for event in events if not isinstance(event, Delta)] == [Resumed("r"), FINISHED]


async def test_leaving_early_cancels_the_request_once() -> None:
    """S5: the engine is told, the rest is not kept, a waiting reader is let go."""
    stream, abandoned = stream_of()
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await reader
    stream.push(token(1))
    assert [event async for event in stream] == []
    assert abandoned == ["r"]
