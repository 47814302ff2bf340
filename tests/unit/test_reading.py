"""Reading images in the library: the question, the check, the one retry, what is raised."""

from __future__ import annotations

import json

import msgspec
import pytest
from PIL import Image as Pillow

from pictures import encoded, first_pixel, plain, uri
from reading_runtime import READER_INFO, ReadingRuntime
from stoker.errors import InvalidRequestError, ReadingError, UnsupportedError, error_from_info
from stoker.images import Image, ImageReport
from stoker.ipc.constraint import ConstraintKind
from stoker.ipc.request import IMAGE_MARKER, FinishReason, Priority
from stoker.tasks.read_images import Question, read_images

REPORT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PNG = plain(200, 100)


def read(runtime, *args, **fields):
    """One reading."""
    return read_images(runtime, *args, **fields)


async def test_a_picture_comes_first_and_the_question_on_its_own_line():
    """SPEC V4: the usual question asks for a JSON object, greedily."""
    runtime = ReadingRuntime('{"n":1}')
    reading = await read(runtime, PNG, Question())
    assert (reading.value, reading.text, reading.attempts) == ({"n": 1}, '{"n":1}', 1)
    assert reading.images == (ImageReport(200, 100, "PNG", shrunk_to=(100, 50)),)
    (request,) = runtime.requests
    assert f"{IMAGE_MARKER}\nRead this report as JSON." in request.prompt
    assert (request.pictures[0].width, request.pictures[0].height) == (100, 50)
    assert request.sampling.temperature == 0
    assert request.constraint.kind is ConstraintKind.JSON_OBJECT
    assert request.is_chat


async def test_several_pictures_are_asked_about_together(tmp_path):
    """SPEC V2, V4: of whatever kind each is given; further fields are the request's."""
    path = tmp_path / "a.png"
    path.write_bytes(plain(colour=(1, 1, 1)))
    colours = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]
    pictures = [plain(colour=colour) for colour in colours]
    given = [path, uri(pictures[1]), Image(pictures[2]), Pillow.new("RGB", (9, 9), colours[3])]
    runtime = ReadingRuntime("{}")
    await read(runtime, given, Question(max_tokens=7), priority=Priority.BACKGROUND)
    (request,) = runtime.requests
    assert IMAGE_MARKER * 4 in request.prompt
    assert [first_pixel(picture) for picture in request.pictures] == colours
    assert (request.max_tokens, request.priority) == (7, Priority.BACKGROUND)


async def test_a_cancelled_reading_is_not_asked_again():
    """SPEC V4, Q6: whoever cancelled it wanted no second attempt; several answers are none."""
    runtime = ReadingRuntime('{"n":', reason=FinishReason.CANCELLED)
    with pytest.raises(ReadingError, match="cancelled") as caught:
        await read(runtime, PNG, Question())
    assert caught.value.details["text"] == '{"n":'
    assert len(runtime.requests) == 1
    with pytest.raises(InvalidRequestError, match="one answer"):
        await read(runtime, PNG, Question(), n=2)


async def test_a_schema_holds_the_answer_and_checks_it():
    """SPEC V4: a constraint for the model, and validated whatever comes."""
    runtime = ReadingRuntime('{"n":3}')
    assert (await read(runtime, PNG, Question(schema=REPORT))).value == {"n": 3}
    constraint = runtime.requests[0].constraint
    assert (constraint.kind, json.loads(constraint.source)) == (ConstraintKind.JSON_SCHEMA, REPORT)


@pytest.mark.parametrize("bad", ["no JSON", '{"n":"three"}', "[]", '{"n":1'])
async def test_a_wrong_answer_is_asked_for_once_more_with_another_draw(bad):
    """SPEC V4: one automatic retry."""
    runtime = ReadingRuntime(bad, '{"n":4}')
    reading = await read(runtime, PNG, Question(schema=REPORT))
    assert (reading.value, reading.attempts) == ({"n": 4}, 2)
    first, second = (request.sampling for request in runtime.requests)
    assert first.temperature == 0 < second.temperature
    assert first.seed != second.seed
    assert runtime.requests[0].pictures == runtime.requests[1].pictures


async def test_two_wrong_answers_are_an_error_that_carries_the_text():
    """SPEC V4: typed, 422, and the text survives a process boundary."""
    runtime = ReadingRuntime("bad", '{"n":[]}')
    with pytest.raises(ReadingError, match="at n") as caught:
        await read(runtime, PNG, Question(schema=REPORT))
    error = error_from_info(caught.value.info())
    assert (type(error), error.http_status) == (ReadingError, 422)
    assert error.details == {"text": '{"n":[]}', "attempts": 2}
    assert len(runtime.requests) == 2


async def test_an_answer_that_was_cut_off_gets_twice_the_room():
    """SPEC V4: else the second attempt would end in the same place."""
    runtime = ReadingRuntime('{"n": 12...', '{"n": 1234}')
    assert (await read(runtime, PNG, Question(schema=REPORT, max_tokens=20))).value == {"n": 1234}
    assert [request.max_tokens for request in runtime.requests] == [20, 40]
    runtime = ReadingRuntime('{"n": 12...')
    with pytest.raises(ReadingError, match="cut off after 80 tokens"):
        await read(runtime, PNG, Question(max_tokens=40, schema=REPORT))


async def test_another_question_may_be_answered_in_words():
    """SPEC V4: without a schema the answer is free; JSON is read as such."""
    runtime = ReadingRuntime("Kahapo Zakajol", "7")
    assert (await read(runtime, PNG, Question("Whose is it?"))).value == "Kahapo Zakajol"
    assert runtime.requests[0].constraint is None
    assert (await read(runtime, PNG, Question("How many?"))).value == 7


async def test_a_schema_may_refer_to_itself_and_to_nothing_else():
    """SPEC V4, S4: nothing is fetched for a schema."""
    own = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
    assert (await read(ReadingRuntime('{"n":1}'), PNG, Question(schema=own))).value == {"n": 1}
    away = {"type": "object", "properties": {"n": {"$ref": "http://127.0.0.1:1/schema"}}}
    with pytest.raises(InvalidRequestError, match="cannot be used") as caught:
        await read(ReadingRuntime('{"n":1}'), PNG, Question(schema=away))
    assert caught.value.param == "schema"


def test_a_schema_that_is_none_is_refused_before_anything_is_asked():
    """SPEC V4: 400 naming the place in it."""
    with pytest.raises(InvalidRequestError, match="properties/n/type") as caught:
        Question(schema={"properties": {"n": {"type": "number?"}}})
    assert caught.value.param == "schema"


async def test_what_cannot_be_read_is_an_error_and_nothing_is_asked():
    """SPEC V2, V5: no pictures, a broken one, a model that cannot see."""
    runtime = ReadingRuntime("{}")
    for given in ([], b"rubbish", "none.png", encoded(Pillow.new("RGB", (4, 4)))):
        with pytest.raises(InvalidRequestError):
            await read(runtime, given, Question())
    runtime.info = msgspec.structs.replace(READER_INFO, has_vision=False)
    with pytest.raises(UnsupportedError, match="reader"):
        await read(runtime, PNG, Question())
    assert not runtime.requests
