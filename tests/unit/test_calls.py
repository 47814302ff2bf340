"""Questions to the engine: which are handed out, and which a death of the engine is noted against."""

from __future__ import annotations

from stoker.client.process.exit import EngineExit
from stoker.client.requests.calls import Calls, Question
from stoker.ipc.commands import GetStatus, Tokenize

DEATH = EngineExit("ended with signal 11", is_blamable=True)


def text(question: str) -> Tokenize:
    """A question that native code answers."""
    return Tokenize(call_id=0, model="m", text=question)


def handed_out(calls: Calls, *, has_texts: bool = True) -> list[str]:
    """What is handed out now: the text of each question, or that it asks for the status."""
    questions: list[Question] = calls.take_unsent(has_texts=has_texts)
    return [each.text if isinstance(each, Tokenize) else type(each).__name__ for each in questions]


async def test_a_question_that_an_engine_has_died_on_is_asked_by_itself() -> None:
    """The others follow when it is answered."""
    calls = Calls()
    waits = [calls.open(text("one")), calls.open(text("two"))]
    assert handed_out(calls) == ["one", "two"]
    calls.engine_exited(DEATH)
    assert handed_out(calls) == ["one"]
    waits.append(calls.open(text("three")))
    assert handed_out(calls) == []
    waits[0].cancel()
    assert handed_out(calls) == ["two"]


async def test_the_status_is_told_while_questions_and_requests_are_tried_one_by_one() -> None:
    """The answer needs no native code: it neither waits for a trial nor could have caused a death."""
    calls = Calls()
    waits = [calls.open(text("one"))]
    assert handed_out(calls) == ["one"]
    calls.engine_exited(DEATH)
    waits += [calls.open(GetStatus(call_id=0)), calls.open(text("two"))]
    assert handed_out(calls, has_texts=False) == ["GetStatus"]
    assert calls.in_flight() == []
    assert handed_out(calls) == ["one"]
    assert len(calls.in_flight()) == 1
    waits.append(calls.open(GetStatus(call_id=0)))
    assert handed_out(calls) == ["GetStatus"]
    assert all(not each.done() for each in waits)
