"""Reading images: a question about them, answered as JSON that is checked (SPEC V4).

Owns the form of the question, the schema's two uses (it constrains the answer and checks it) and the one
retry. Images are `stoker.images`' business; how an answer comes about is that of who gives it: a runtime
here, a server for the command line.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import msgspec

from stoker.client.requests.group import KnownAs
from stoker.client.requests.stream import StreamEvent, TextDelta, text_deltas
from stoker.errors import InvalidRequestError, ReadingError
from stoker.images.image import Image, ImageLike, ImageReport, images_of
from stoker.images.intake import image_reports
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.status import CallKind
from stoker.tasks.chat import ChatPlan, chat_deltas
from stoker.tasks.fields import CallKeywords, request_of, struct_fields
from stoker.tasks.form import AnswerSchema, Schema
from stoker.tasks.tensor_call import TaskRuntime

__all__ = [
    "DEFAULT_ASK",
    "MAX_TOKENS",
    "Attempt",
    "Question",
    "Reading",
    "Told",
    "pictures_of",
    "read_images",
    "read_with",
    "told_by",
]

DEFAULT_ASK = "Read this report as JSON."
MAX_TOKENS = 1024
"""Of an answer that does not say; twice as many where the first one was cut off."""
_RETRY_TEMPERATURE = 0.5
_SEEDS = (1, 2)
_GIVEN_UP = {FinishReason.CANCELLED, FinishReason.PREEMPTED}


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was read.

    Attributes:
        value: the answer as JSON values, or an instance of the class that was asked for; where no form was
            asked for and it is no JSON, its text.
        text: the answer as it came.
        images: what became of each image.
        attempts: how often it was asked, 1 or 2.
    """

    value: Any
    text: str
    images: tuple[ImageReport, ...] = ()
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """How to ask this time.

    Attributes:
        sampling: fields of `Sampling`.
        max_tokens: of the answer.
    """

    sampling: Mapping[str, Any]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """An answer; `is_cut`: there was no room for all of it."""

    text: str
    images: tuple[ImageReport, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked and what the answer has to be.

    Attributes:
        ask: the question; None: the usual one, which asks for a JSON object.
        schema: JSON Schema of the answer, or a class that pydantic knows; None: any JSON object for the usual
            question, else any text.
        max_tokens: of the answer.

    Raises:
        InvalidRequestError: the schema is none.
    """

    ask: str | None = None
    schema: Schema | None = None
    max_tokens: int = MAX_TOKENS
    _form: AnswerSchema | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        schema = {"type": "object"} if self.schema is None else self.schema
        if self.schema is not None or self.ask is None:
            object.__setattr__(self, "_form", AnswerSchema(schema))

    @classmethod
    def taken_from(cls, ask: str | None, schema: Schema | None, fields: CallKeywords) -> Self:
        """The question of a call; `max_tokens` is taken out of its `fields`."""
        max_tokens = fields.pop("max_tokens", None)
        return cls(ask, schema, MAX_TOKENS if max_tokens is None else max_tokens)

    @property
    def text(self) -> str:
        """What is asked; it stands on a line of its own behind the images."""
        return f"\n{DEFAULT_ASK if self.ask is None else self.ask}"

    @property
    def constraint(self) -> Constraint | None:
        """What the answer is held to while it is written. Raises InvalidRequestError over a limit."""
        if self._form is None:
            return None
        if self.schema is None:
            return Constraint(kind=ConstraintKind.JSON_OBJECT)
        return Constraint.of_schema(self._form.json)

    def value(self, text: str) -> Any:
        """The answer's value. Raises ValueError that says why it is not what was asked for."""
        if self._form is not None:
            return self._form.value(text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


async def read_with(question: Question, answer: Callable[[Attempt], Awaitable[Told]]) -> Reading:
    """Ask, and once more where the answer is not what was asked for.

    The first time the likeliest tokens are taken, the second time they are drawn.

    Raises:
        ReadingError: neither answer was; it carries the last one's text.
        StokerError: what `answer` raised.
    """
    reason, told, max_tokens = "", Told(""), question.max_tokens
    for number, seed in enumerate(_SEEDS):
        sampling = {"temperature": _RETRY_TEMPERATURE if number else 0.0, "seed": seed}
        told = await answer(Attempt(sampling, max_tokens))
        try:
            value = question.value(told.text)
        except ValueError as error:
            reason = f"cut off after {max_tokens} tokens" if told.is_cut else str(error)
            max_tokens *= 2 if told.is_cut else 1
        else:
            return Reading(value=value, text=told.text, images=told.images, attempts=number + 1)
    raise ReadingError(
        f"what was read is not of the form that was asked for, in {len(_SEEDS)} attempts: {reason}",
        text=told.text,
        attempts=len(_SEEDS),
    )


async def read_images(
    runtime: TaskRuntime,
    images: ImageLike | Sequence[ImageLike],
    question: Question,
    **fields: Unpack[CallKeywords],
) -> Reading:
    """Read one image, or several that belong together.

    Args:
        runtime: that has the model.
        images: paths, bytes, data URIs, Pillow images or `Image`s.
        question: what is asked.
        fields: of `GenerateRequest`, `Sampling` and `KnownAs`, by name; `model` reads images.

    Raises:
        UnsupportedError: the model reads no images.
        InvalidRequestError: an image is not taken; `param` names it.
        ReadingError: the answer is not what was asked for, or was cancelled.
        RequestCancelledError: the call was cancelled by its id before it was asked.
        StokerError: a request failed.
    """
    pictures = pictures_of(images, fields)
    wanted: dict[str, Any] = {"constraint": question.constraint, **struct_fields(fields)}
    known_as = KnownAs.taken_from(wanted)
    info = runtime.resolve(fields.get("model"))
    turn = {"role": "user", "content": [*pictures, question.text]}
    plan = await runtime.prepare_chat([turn], model=info.id)
    taken = await runtime.images.take(plan.images)
    given = plan.fields(wanted | {"model": info.id})
    given["pictures"] = tuple(one.picture for one in taken)
    reports = image_reports(taken)

    async def answer(attempt: Attempt) -> Told:
        how = {"max_tokens": attempt.max_tokens, **attempt.sampling, **given}
        return await _told(group.stream, request_of(plan.prompt, how), plan, reports)

    first = request_of(plan.prompt, given)
    with runtime.group(CallKind.READ, first, 1, known_as) as group:
        return await read_with(question, answer)


def pictures_of(images: ImageLike | Sequence[ImageLike], fields: CallKeywords) -> list[Image]:
    """What a call is to read.

    Raises:
        InvalidRequestError: an image is not taken, there is none, or `fields` ask for several answers.
    """
    if fields.get("n", 1) != 1:
        raise InvalidRequestError("a reading is one answer; n is not taken", param="n")
    if not (pictures := images_of(images)):
        raise InvalidRequestError("there are no pictures to read", param="images")
    return pictures


async def _told(
    stream: Callable[[GenerateRequest], AsyncGenerator[StreamEvent, None]],
    request: GenerateRequest,
    plan: ChatPlan,
    images: tuple[ImageReport, ...],
) -> Told:
    async with (
        aclosing(stream(request)) as events,
        aclosing(text_deltas(request, events)) as pieces,
        aclosing(chat_deltas(pieces, plan.form)) as deltas,
    ):
        return await told_by(deltas, images)


async def told_by(deltas: AsyncIterator[TextDelta], images: tuple[ImageReport, ...]) -> Told:
    """The answer that comes in pieces.

    Raises:
        ReadingError: it was cancelled or preempted.
        StokerError: the request failed.
    """
    parts, is_cut = [], False
    async for delta in deltas:
        parts.append(delta.text)
        is_cut = is_cut or delta.finish_reason is FinishReason.LENGTH
        if delta.finish_reason in _GIVEN_UP:  # that was asked for; nothing is asked again
            told = f"the answer was not finished: {delta.finish_reason}"
            raise ReadingError(told, text="".join(parts), attempts=1)
    return Told("".join(parts).strip(), images, is_cut)
