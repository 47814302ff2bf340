"""Conversations in a body: messages, tools, and functions, which are tools in their older form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Required

from pydantic import AliasChoices, Field, with_config
from typing_extensions import TypedDict

from stoker.chat.conversation import ToolOffer
from stoker.chat.reasoning import reasoning_of
from stoker.chat.turns import may_hold_documents
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.constraint import Constraint
from stoker.ipc.request import MAX_TOKENS, check_range
from stoker.server.fields import GenerationFields, Int, ResponseFormat, check_logprobs
from stoker.server.inbound.bodies import while_connected
from stoker.server.inbound.body import Body, Many, Name, Named
from stoker.tasks.chat import effort_args, offer_of, offer_of_functions

if TYPE_CHECKING:
    from starlette.requests import Request

    from stoker.server.context import ServerContext
    from stoker.tasks.chat import ChatPlan


def function_offer(functions: Sequence[Any], function_call: Any) -> ToolOffer:
    """The offer of `functions`, with `function_call` as the choice among them.

    Raises:
        InvalidRequestError: malformed; `param` names the field.
    """
    try:
        return offer_of([_tool(one) for one in functions], _choice(function_call), is_parallel=False)
    except InvalidRequestError as error:
        raise InvalidRequestError(_named(error.message), param=_named(error.param or "")) from None


def call_id(name: str) -> str:
    """The id that links a call of this function to its result: the old form has names only."""
    return f"call_{name}"


def tool_call(call: Any) -> Any:
    """`function_call` of a message as an entry of `tool_calls`; one that is none stays as it is."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return call
    return {"id": call_id(call["name"]), "type": "function", "function": dict(call)}


def _tool(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _choice(given: Any) -> Any:
    return _tool({"name": given.get("name")}) if isinstance(given, Mapping) else given


def _named(text: str) -> str:
    """A message or path about tools, about functions."""
    text = text.replace("tool_choice.function", "function_call").replace("tool_choice", "function_call")
    return text.replace(".function", "").replace("tools", "functions")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_RESERVED_ARGS = frozenset({"messages", "model", "options", "self", "tools"})


_PICTURES = frozenset({"image_url", "input_image"})
_FILE_FIELDS = ("file_data", "file_url", "file_id", "filename", "title", "context")
_ROLES = {"developer": "system", "function": "tool"}


class ContentPart(Body):
    """A piece of a message: text, an image, a recording or a document."""

    type: str
    text: str | None = None
    image_url: str | Named[Any] | None = None
    input_audio: Named[Any] | None = None
    file: Named[Any] | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None
    title: str | None = None
    context: str | None = None


@with_config(Body.model_config)
class Message(TypedDict, total=False):
    """One turn of a conversation: the caller's own object, with the fields that are known."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool", "function"]]
    content: str | Many[ContentPart] | None
    name: str | None
    tool_calls: Any  # of old turns: what a model wrote wrongly ends no conversation
    tool_call_id: str | None
    function_call: Any
    reasoning_content: str | None
    reasoning: Any  # the same where it is text; some gateways send an object


def turns_of(messages: Sequence[Message], model: str) -> list[dict[str, Any]]:
    """The messages as the template gets them.

    Args:
        messages: of the body, at `messages`.
        model: its name, for errors.

    Raises:
        UnsupportedError: a part is neither text, an image, a recording nor a document.
        InvalidRequestError: a text part without text, or a turn without content.
    """
    return [_turn(message, f"messages.{index}", model) for index, message in enumerate(messages)]


def _turn(message: Message, where: str, model: str) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    optional: dict[str, Any] = {name: message.get(name) for name in ("name", "tool_calls", "tool_call_id")}
    if role == "assistant":
        optional["reasoning_content"] = reasoning_of(message) or None
        if (call := message.get("function_call")) is not None:
            optional["tool_calls"] = [tool_call(call)]
    elif role == "function":
        optional["tool_call_id"] = call_id(message.get("name") or "")
    if content is None and not (optional["tool_calls"] or optional.get("reasoning_content")):
        place = f"{where}.content"
        raise InvalidRequestError(f"{place}: a {role} message needs content", param=place)
    turn = {"role": _ROLES.get(role, role), "content": _content(content, f"{where}.content", model)}
    return turn | {name: value for name, value in optional.items() if value is not None}


def _content(
    content: str | Sequence[ContentPart] | None, where: str, model: str
) -> str | list[dict[str, Any]]:
    """Text, or the parts as `stoker.images.turns` joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, f"{where}.{index}", model) for index, part in enumerate(content)]


def _part(part: ContentPart, where: str, model: str) -> dict[str, Any]:
    if part.type in _PICTURES:
        return {"type": part.type, "image_url": part.image_url}
    if part.type == "input_audio":
        return {"type": part.type, "input_audio": part.input_audio}
    if part.type == "file":
        return {"type": part.type, "file": part.file}
    if part.type == "input_file":
        return {"type": part.type} | {name: getattr(part, name) for name in _FILE_FIELDS}
    if part.type not in ("text", "input_text"):
        raise UnsupportedError(
            f"{where}: the model {model} takes no part of type {part.type[:40]!r}", param=where
        )
    if part.text is None:
        raise InvalidRequestError(f"{where}.text is missing", param=f"{where}.text")
    return {"type": "text", "text": part.text}


class ThinkingFields(Body):
    """Whether the model thinks before it answers, and the template's other variables."""

    chat_template_kwargs: Named[Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    def thinking_args(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Template variables that these fields set; they beat `own`, those of the API's own fields."""
        given = dict(own or {})
        if self.reasoning_effort is not None:
            given |= effort_args(self.reasoning_effort)
        if self.enable_thinking is not None:
            given["enable_thinking"] = self.enable_thinking
        return given | (self.chat_template_kwargs or {})


class ConversationFields(ThinkingFields):
    """Messages, and the template's other variables."""

    messages: Many[Message] = Field(min_length=1)
    model: Name | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Many[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    tool_format: Name | None = None
    functions: Many[Any] | None = None
    function_call: Any = None

    @property
    def has_functions(self) -> bool:
        """Whether the caller offers functions in the form that was before tools, and reads calls in it."""
        return bool(self.functions)

    def offer(self) -> ToolOffer:
        """The tools and what is to be done with them; none where the model may call none.

        Tools that are no functions are left out; the answer's headers name them.

        Raises:
            InvalidRequestError, UnsupportedError: naming the field.
        """
        if self.functions:
            if self.tools:
                text = "functions and tools cannot be offered together: functions are the old form of tools"
                raise InvalidRequestError(text, param="functions")
            offer = function_offer(self.functions, self.function_call)
            return dataclasses.replace(offer, tool_format=self.tool_format)
        tools = None if self.tool_choice == "none" else self.tools
        choice = None if self.tool_choice == "none" else self.tool_choice
        is_parallel = self.parallel_tool_calls is not False
        return offer_of_functions(tools, choice, is_parallel=is_parallel, tool_format=self.tool_format)

    def turns(self, model: str) -> list[dict[str, Any]]:
        """The messages as the template gets them; see `turns_of`."""
        return turns_of(self.messages, model)

    def template_args(self) -> dict[str, Any]:
        """Further template variables.

        Raises:
            InvalidRequestError: one of them has a name that is taken.
        """
        given = self.thinking_args()
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if taken := _RESERVED_ARGS.intersection(given):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        return given


class ChatRequest(ConversationFields, GenerationFields):
    """A chat completion to make."""

    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_tokens", "n_predict"))
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None

    def check_last_turns(self) -> None:
        """Refuse two assistant messages at the end, unless a field says whether the last one is continued.

        Raises:
            InvalidRequestError: there are two, and no field says so.
        """
        roles = [(message["role"], bool(message.get("tool_calls"))) for message in self.messages[-2:]]
        is_said = self.add_generation_prompt is not None or self.continue_final_message is not None
        if roles == [("assistant", False)] * 2 and not is_said:
            text = (
                "messages: the last two are both the assistant's: set continue_final_message to continue the"
                " last one, or add_generation_prompt to begin a new turn"
            )
            raise InvalidRequestError(text, param="messages")

    def constraint(self) -> Constraint | None:
        """What the answer has to match: a format, or what a further field says; not both."""
        made = super().constraint()
        wanted = self.response_format.constraint() if self.response_format else None
        if made is not None and wanted is not None:
            text = f"response_format and {made.param} cannot be asked for together"
            raise InvalidRequestError(text, param="response_format")
        return made if wanted is None else wanted

    def token_limit(self) -> int | None:
        """Tokens to generate at most; the newer name wins.

        Raises:
            InvalidRequestError: there may be none.
        """
        for name in ("max_completion_tokens", "max_tokens"):
            if (limit := getattr(self, name)) is not None:
                check_range(name, limit, 1, MAX_TOKENS)
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: no logprobs.

        Raises:
            InvalidRequestError: out of range, or alternatives without `logprobs`.
        """
        check_logprobs("top_logprobs", self.top_logprobs)
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


async def laid_out(
    context: ServerContext, request: Request, turns: list[dict[str, Any]], **how: Any
) -> ChatPlan:
    """As `Runtime.prepare_chat`; what reads documents, which takes seconds, is ended when the client leaves.

    Raises:
        ClientGoneError: it left.
        StokerError: as the runtime's.
    """
    preparing = context.runtime.prepare_chat(turns, **how)
    if not may_hold_documents(turns):
        return await preparing
    return await while_connected(preparing, request.receive)
