"""Many prompts, each with its whole answer, as background work that waits where the queue is full.

Owns how many are asked at once, what becomes of one that fails, and how long the rest will take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import msgspec

from stoker.client.requests.record import request_id_of
from stoker.errors import InvalidRequestError, StokerError
from stoker.ipc.request import FinishReason
from stoker.tasks.ask import Answer, AnsweringRuntime, AskKeywords, ask
from stoker.tasks.backpressure import MAX_IN_FLIGHT, NO_ROOM, Backpressure
from stoker.tasks.fields import Message, Prompt, unknown_field
from stoker.tasks.form import AnswerSchema, Several, T

__all__ = ["BatchKeywords", "BatchProgress", "batch"]

_PACE_OVER = 64
"""The rate of an estimate is that of so many answers, the last ones."""
_MAX_WAIT_S = 30.0
"""The longest wait before a queue that is full of others' requests is asked again."""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch is, told with each answer.

    Attributes:
        num_done, num_total: answers, those that failed included.
        num_failed: answers with an `error`.
        eta_s: seconds until the last one, at the rate of the last answers.
        index: of the prompt that was answered.
        answer: to it.
    """

    num_done: int
    num_total: int
    num_failed: int
    eta_s: float
    index: int
    answer: Answer


class BatchKeywords(AskKeywords[T], total=False):
    """Those of `ask`, and how the batch is run; see `batch`."""

    progress: Callable[[BatchProgress], object] | None
    concurrency: int | None


async def batch(
    runtime: AnsweringRuntime,
    prompts: Several[Prompt | Sequence[Message]],
    **keywords: Unpack[BatchKeywords[T]],
) -> list[Answer[T]]:
    """The answers to all prompts, in their order; none is lost to a full queue.

    A prompt that fails does not end the others: its answer has `finish_reason` "error" and the `error`. To
    keep answers as they come, write them in `progress`. Cancelling the call cancels what it has asked.

    Args:
        runtime: that has the model.
        prompts: texts, conversations or token ids, each as for `ask`.
        keywords: as for `ask`, for all of them; `priority` is "background" unless it is given, so that people
            go first; the request of prompt i has the id `request_id`-i. `progress` is called with a
            `BatchProgress` after each answer; what it raises ends the batch. `concurrency` is how many are
            asked at once, at most; None: 64. They are fewer where the queue is full.

    Raises:
        InvalidRequestError: a field is wrong, so that no prompt could be answered.
        ModelNotFoundError: the model is not served.
    """
    fields: dict[str, Any] = {"priority": "background", **keywords}
    progress, concurrency = fields.pop("progress", None), fields.pop("concurrency", None)
    waiting = _checked(prompts, concurrency, fields)
    if (schema := fields.get("schema")) is not None:
        fields["schema"] = AnswerSchema.of(schema)
    model = runtime.resolve(fields.get("model")).id
    run = _Batch(runtime, model, fields, len(waiting), progress)
    items = iter(enumerate(waiting))
    pressure = Backpressure(concurrency or MAX_IN_FLIGHT)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(waiting), concurrency or MAX_IN_FLIGHT)):
                group.create_task(run.work(items, pressure))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [run.answers[index] for index in range(len(waiting))]


def _checked(
    prompts: Any, concurrency: int | None, fields: Mapping[str, Any]
) -> list[Prompt | Sequence[Message]]:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        text = f"prompts is a list of prompts, got {type(prompts).__name__}; ask answers one"
        raise InvalidRequestError(text, param="prompts")
    if concurrency is not None and not (isinstance(concurrency, int) and concurrency >= 1):
        text = f"concurrency is {concurrency!r:.60}; it is a number of 1 or more"
        raise InvalidRequestError(text, param="concurrency")
    for name in fields.keys() - AskKeywords.__annotations__.keys():
        raise unknown_field(name)
    return list(prompts)


class _Batch:
    """One call: its answers so far, and its pace."""

    def __init__(
        self,
        runtime: AnsweringRuntime,
        model: str,
        fields: Mapping[str, Any],
        num_total: int,
        progress: Callable[[BatchProgress], object] | None,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self._runtime = runtime
        self._model = model
        self._fields = fields
        self._same_for_all = fields.keys() - {"request_id"}  # of which each prompt has its own
        self._id = request_id_of(fields.get("request_id"))
        self._num_total = num_total
        self._num_failed = 0
        self._progress = progress
        self._rate = AnswerRate(time.monotonic())

    async def work(
        self, items: Iterator[tuple[int, Prompt | Sequence[Message]]], pressure: Backpressure
    ) -> None:
        """Answer prompts until there are no more."""
        for index, prompt in items:
            own_id = f"{self._id}-{index}"
            try:
                answer = await self._patiently(prompt, own_id, pressure)
            except StokerError as error:
                if isinstance(error, InvalidRequestError) and error.param in self._same_for_all:
                    raise
                answer = self._failed(error, own_id)
            self._note(index, answer)

    async def _patiently(
        self, prompt: Prompt | Sequence[Message], own_id: str, pressure: Backpressure
    ) -> Answer:
        fields: Any = {**self._fields, "request_id": own_id}
        while True:
            try:
                return await pressure.run(partial(ask, self._runtime, prompt, **fields))
            except NO_ROOM as error:  # of others' requests
                wait_s = 1.0 if error.retry_after_s is None else error.retry_after_s
                await asyncio.sleep(min(wait_s, _MAX_WAIT_S))

    def _failed(self, error: StokerError, own_id: str) -> Answer:
        text = str(error.details.get("text", ""))
        reason = FinishReason.ERROR
        return Answer(text=text, finish_reason=reason, request_id=own_id, model=self._model, error=error)

    def _note(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self._num_failed += answer.error is not None
        self._rate.note(time.monotonic())
        if self._progress is not None:
            num_done = len(self.answers)
            self._progress(
                BatchProgress(
                    num_done=num_done,
                    num_total=self._num_total,
                    num_failed=self._num_failed,
                    eta_s=self._rate.eta_s(self._num_total - num_done),
                    index=index,
                    answer=answer,
                )
            )


class AnswerRate:
    """The rate of answers now: over the last ones, or since the beginning where there are few."""

    def __init__(self, began_s: float) -> None:
        self._times_s = deque([began_s], maxlen=_PACE_OVER + 1)

    def note(self, now_s: float) -> None:
        """Another answer came."""
        self._times_s.append(now_s)

    def eta_s(self, num_left: int) -> float:
        """Seconds for so many more."""
        return num_left * (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)
