"""Whole answers: the deltas of a generation or a chat gathered into one value.

Owns `Answer`, and which of the two calls a prompt goes to. `Runtime` and the runtime of a server elsewhere
have both calls, so these functions take either.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, Unpack

import msgspec

from stoker.client.requests.stream import TextDelta, ToolCall
from stoker.errors import AnswerInvalidError, InvalidRequestError, StokerError
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, TokenLogprob, Usage
from stoker.tasks.fields import (
    ConversationKeywords,
    GenerateKeywords,
    Message,
    Prompt,
    checked_prompt,
    is_conversation,
)
from stoker.tasks.form import AnswerSchema, T

__all__ = ["Answer", "AnsweringRuntime", "AskKeywords", "ask"]

_GIVEN_UP = {FinishReason.CANCELLED, FinishReason.PREEMPTED}


class Answer(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A whole answer; `Answer[T]`: one whose `schema` was the class T.

    Attributes:
        text: without the reasoning and without the calls.
        reasoning: what the model wrote before its answer; empty: none.
        tool_calls: functions that it wants called.
        finish_reason: why it ended; `cancelled` and `preempted` ones have the text that there was.
        request_id: its own.
        model: id of the model that answered.
        usage: tokens of prompt and answer, and how many came from the cache.
        timings: seconds in the queue, for the prompt, for the answer.
        token_ids: of the whole answer, reasoning and calls included; empty where a server did not tell.
        logprobs: of the same tokens, where `logprobs` was asked for.
        parsed: by `schema`: an instance of the class, or JSON values; None: no schema was given, or the
            answer is a call or was cancelled.
        error: why one of a batch has no answer, `finish_reason` is "error" then; `ask` raises it.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason
    request_id: str
    model: str
    usage: Usage = Usage()
    timings: Timings = Timings()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    parsed: T = None  # type: ignore[assignment] # a call, or cancelled
    error: StokerError | None = None


class AskKeywords(ConversationKeywords[T], total=False):
    """Those of `chat`; `raw`: a text is continued as it is, not laid out as a user's turn."""

    raw: bool


class AnsweringRuntime(Protocol):
    """What a runtime has that answers."""

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name."""
        ...

    def generate(self, prompt: Prompt, **fields: Unpack[GenerateKeywords]) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt."""
        ...

    def chat(
        self, messages: str | Sequence[Message], **fields: Unpack[ConversationKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation."""
        ...


async def ask(
    runtime: AnsweringRuntime, prompt: Prompt | Sequence[Message], **fields: Unpack[AskKeywords[T]]
) -> Answer[T]:
    """The whole answer to a text or a conversation.

    A text is a user's turn where the model takes conversations, else it is continued.

    Args:
        runtime: that has the model.
        prompt: text, messages as for `chat`, or token ids, which are continued.
        fields: as for `chat`; `raw` True: a text is continued as it is, with the fields of `generate`;
            `schema` says what `parsed` is.

    Raises:
        InvalidRequestError: `n` is not 1, or a field is wrong.
        AnswerInvalidError: the answer is not of the `schema`; its details carry the `text`.
        StokerError: the request was refused or failed.
    """
    given: dict[str, Any] = {**fields}
    if given.get("n", 1) != 1:
        raise InvalidRequestError("ask gives one answer; for several, n is a field of generate", param="n")
    if not prompt and not isinstance(prompt, str) and prompt is not None:
        raise InvalidRequestError("prompt is empty: there are no messages and no tokens", param="prompt")
    raw = given.pop("raw", False)
    schema = None
    if given.get("schema") is not None:
        schema = given["schema"] = AnswerSchema.of(given["schema"])
    info = runtime.resolve(given.get("model"))
    if is_conversation(prompt) or (isinstance(prompt, str) and info.takes_conversations and not raw):
        deltas = runtime.chat(prompt, **given)
    else:
        deltas = runtime.generate(checked_prompt(prompt), **given)
    async with aclosing(deltas):
        answer = await _gathered(deltas, info.id)
    return answer if schema is None else _parsed(answer, schema)


def _parsed(answer: Answer, schema: AnswerSchema) -> Answer:
    if answer.tool_calls or answer.finish_reason in _GIVEN_UP:
        return answer
    try:
        value = schema.value(answer.text)
    except ValueError as error:
        num_tokens = answer.usage.completion_tokens
        is_cut = answer.finish_reason is FinishReason.LENGTH
        reason = f"it was cut off after {num_tokens} tokens (max_tokens)" if is_cut else str(error)
        raise AnswerInvalidError(f"the answer is not of the schema: {reason}", text=answer.text) from None
    return msgspec.structs.replace(answer, parsed=value)


async def _gathered(deltas: AsyncGenerator[TextDelta, None], model: str) -> Answer:
    parts = [delta async for delta in deltas]
    last = parts[-1]
    assert last.finish_reason is not None, "the last delta says why the answer ended"
    logprobs = tuple(one for part in parts for one in part.logprobs or ())
    return Answer(
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        finish_reason=last.finish_reason,
        request_id=last.request_id,
        model=model,
        usage=last.usage or Usage(),
        timings=last.timings or Timings(),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=logprobs or None,
    )
