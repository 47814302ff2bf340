"""Bodies of the Responses API: another spelling of chat completions.

A body becomes that of a chat completion as JSON values, which that route's schema checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import GenerateRequest
from stoker.json_size import num_chars
from stoker.server.errors import OriginRules
from stoker.server.fields import GenerationFields, Int, ResponseFormat, tier_of
from stoker.server.inbound.body import Many, Name, Named
from stoker.server.openai.chat import Translation
from stoker.server.openai.conversation import ThinkingFields
from stoker.server.openai.responses.items import Item, messages_of
from stoker.tasks.chat import effort_args

IGNORED_TOOLS = "stoker_ignored_tools"
"""Key in the answer's metadata: the tools that the model was not told of."""

MAX_ECHO_CHARS = 2 * 1024**2
"""Of what a response repeats of its request, without the instructions, which are bounded with the prompt. A
stream repeats it three times; 128 tools of 16,000 characters fit."""

MAX_METADATA = 16
"""Pairs of `metadata`, as at OpenAI."""
MAX_METADATA_KEY_CHARS = 64
"""Of each key of `metadata`."""
MAX_METADATA_CHARS = 512
"""Of each value of `metadata`."""

MAX_SUMMARY_TOKENS = 1024
"""Of a compaction that does not say `max_output_tokens`."""

_SUMMARISE = (
    "Summarise our conversation so far for the one who goes on with it and sees nothing else of it. Keep what"
    " was asked for and decided, names, numbers, file paths and code that still matter, what was tried, and"
    " what is to be done next. Write the summary only."
)
_SEALED_REASONING = "reasoning.encrypted_content"
_REFUSED = ("conversation", "background", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_SHARED = frozenset(GenerationFields.model_fields) - {"n", "stream_options"}
_LIMIT = "max_output_tokens"


class ResponsesRequest(ThinkingFields, GenerationFields):
    """A response to make."""

    input: str | Many[Named[Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Int | None = Field(None, ge=1)
    store: bool | None = None
    tools: Many[Named[Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Named[Any] | None = None
    response_format: ResponseFormat | None = None
    reasoning: Named[Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Int | None = None
    include: Many[str] | None = None
    metadata: Named[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    tool_format: Name | None = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    def refuse_unsupported(self) -> None:
        """Refuse what would need conversation objects, several answers or logprobs."""
        super().refuse_unsupported()
        for name, value in self.model_dump(include=set(_REFUSED), exclude_none=True).items():
            if value not in ("", [], {}, False):
                raise UnsupportedError(f"{name} is not supported", param=name)
        if self.n not in (None, 1):
            raise UnsupportedError("a response has one answer; n is not supported here", param="n")
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            raise UnsupportedError("logprobs of responses are not supported", param="top_logprobs")
        _check_metadata(self.metadata or {})

    @property
    def asks_reasoning_back(self) -> bool:
        """Whether reasoning is to be sealed in its items, for clients that pass nothing else back."""
        return _SEALED_REASONING in (self.include or ())

    @property
    def own_items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input or ())

    def to_chat(self, earlier: Sequence[Item] = ()) -> Translation:
        """The chat completion that asks for the same.

        Args:
            earlier: the items of the response that it continues.

        Raises:
            InvalidRequestError: an item, a tool or the choice is malformed; `param` names it.
            UnsupportedError: a kind of item, or a field, is not served.
        """
        self.refuse_unsupported()
        origins = OriginRules({"messages": "input", "prompt": "input", "context_shift": "truncation"})
        origins.add("max_completion_tokens", _LIMIT)
        origins.add("max_tokens", _LIMIT)
        origins.add("tool_choice.allowed_tools", "tool_choice")
        given = {
            "messages": self._messages(earlier, origins),
            "max_completion_tokens": self.max_output_tokens,
            "tools": self._tools(origins) or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": False if self.max_tool_calls == 1 else self.parallel_tool_calls,
            "tool_format": self.tool_format,
            "response_format": self._format(origins),
            "chat_template_kwargs": self.thinking_args(_template_args(self.reasoning)) or None,
            "context_shift": True if self.truncation == "auto" else None,
        }
        body = self.model_dump(include=set(_SHARED), exclude_none=True, by_alias=True)
        return Translation(
            body | {name: value for name, value in given.items() if value is not None}, origins
        )

    def echo(self, asked: GenerateRequest, ignored: str = "") -> dict[str, Any]:
        """What the response object repeats of the request.

        Args:
            asked: what is generated: values that were not given are those that were used.
            ignored: the tools that were left out, as text.

        Raises:
            InvalidRequestError: it is over `MAX_ECHO_CHARS`.
        """
        sampling = asked.sampling
        echo = {
            "background": False,
            "frequency_penalty": sampling.frequency_penalty,
            "instructions": self.instructions,
            _LIMIT: self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": {**(self.metadata or {}), **({IGNORED_TOOLS: ignored} if ignored else {})},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {name: (self.reasoning or {}).get(name) for name in ("effort", "summary")},
            "safety_identifier": self.safety_identifier,
            "service_tier": tier_of(asked.priority),
            "store": self.store is not False,
            "temperature": sampling.temperature,
            "text": {**(self.text or {}), "format": _whole_format((self.text or {}).get("format"))},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_whole_tool(tool) for tool in self.tools or () if _is_told(tool)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
        size = num_chars(echo) - len(self.instructions or "")
        if size > MAX_ECHO_CHARS:
            raise InvalidRequestError(
                f"what a response repeats of its request (metadata, tools, text and the like) has {size}"
                f" characters beside the instructions, at most {MAX_ECHO_CHARS} are taken; shorten metadata",
                param="metadata",
            )
        return echo

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """By the name that the model knows a function by: its namespace, and its name there."""
        return {
            _full_name(tool, inner): (tool["name"], inner["name"])
            for tool in self.tools or ()
            if tool.get("type") == "namespace" and isinstance(tool.get("name"), str)
            for inner in _functions_of(tool)
            if isinstance(inner.get("name"), str)
        }

    def _messages(self, earlier: Sequence[Item], origins: OriginRules) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
            origins.add_text("messages.0", "instructions")
        messages_of((("previous_response_id", item) for item in earlier), messages, origins)
        if isinstance(self.input, str):
            origins.add_text(f"messages.{len(messages)}", "input")
            messages.append({"role": "user", "content": self.input})
        else:
            placed = ((f"input.{index}", item) for index, item in enumerate(self.input or ()))
            messages_of(placed, messages, origins)
        if not messages:
            raise InvalidRequestError("input holds no message", param="input")
        return messages

    def _tools(self, origins: OriginRules) -> list[dict[str, Any]]:
        """The functions in the chat completions' form, those of namespaces too; other tools as they are."""
        tools: list[dict[str, Any]] = []
        for where, name, tool in _each_tool(self.tools or ()):
            place = f"tools.{len(tools)}"
            origins.add(place, where)
            origins.add(f"{place}.function", where)
            if tool.get("type") == "function":
                function = {key: value for key, value in tool.items() if key != "type"} | {"name": name}
                tools.append({"type": "function", "function": function})
            else:
                tools.append(dict(tool))
        return tools

    def _format(self, origins: OriginRules) -> dict[str, Any] | None:
        given = (self.text or {}).get("format")
        if not isinstance(given, Mapping) or given.get("type") in (None, "text"):
            if self.response_format is None:
                return None
            return self.response_format.model_dump(exclude_none=True, by_alias=True)
        if self.response_format is not None:
            text = "text.format and response_format cannot be asked for together"
            raise InvalidRequestError(text, param="response_format")
        origins.add("response_format", "text.format")
        origins.add("response_format.json_schema", "text.format")
        if given["type"] != "json_schema":
            return {"type": str(given["type"])}
        return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


class InputTokensRequest(ResponsesRequest):
    """A response whose prompt is to be counted; the instructions alone are enough."""

    input: str | Many[Named[Any]] | None = None  # type: ignore[assignment] # it may be left out here


class CompactRequest(ResponsesRequest):
    """A conversation to be summarised, so that a shorter one goes on."""

    model: Name
    input: str | Many[Named[Any]] | None = None  # type: ignore[assignment] # it may be left out here

    def to_chat(self, earlier: Sequence[Item] = ()) -> Translation:
        """The chat completion whose answer is the summary; it begins as the conversation does.

        Raises:
            InvalidRequestError, UnsupportedError: as of a response.
        """
        asked = super().to_chat(earlier)
        *before, last = asked.body["messages"]
        if last["role"] == "user":  # some templates refuse two turns of one side
            content = last["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            turns = [*before, {**last, "content": [*parts, {"type": "text", "text": _SUMMARISE}]}]
        else:
            turns = [*before, last, {"role": "user", "content": _SUMMARISE}]
        body = {
            **asked.body,
            "messages": turns,
            "max_completion_tokens": self.max_output_tokens or MAX_SUMMARY_TOKENS,
            "tool_choice": "none",
            "stream": False,
            "chat_template_kwargs": self.thinking_args(effort_args("none")),
        }
        return Translation(body, asked.origins)


def default_echo() -> dict[str, Any]:
    """What a response object repeats of a request that said nothing but its input."""
    return ResponsesRequest.model_validate({"input": ""}).echo(GenerateRequest(prompt=""))


# ------------------------------------------------------------ tools


def _each_tool(tools: list[dict[str, Any]] | tuple[()]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(place, name for the model, tool) of each; a namespace is the tools in it."""
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type") != "namespace":
            yield where, tool.get("name"), tool
            continue
        if not isinstance(tool.get("name"), str):
            raise InvalidRequestError(f"{where}.name is not text", param=f"{where}.name")
        for number, inner in enumerate(_functions_of(tool, where)):
            yield f"{where}.tools.{number}", _full_name(tool, inner), inner


def _functions_of(namespace: Mapping[str, Any], where: str = "tools") -> list[dict[str, Any]]:
    inner = namespace.get("tools")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise InvalidRequestError(f"{where}.tools is not a list of tools", param=f"{where}.tools")
    return inner


def _full_name(namespace: Mapping[str, Any], tool: Mapping[str, Any]) -> Any:
    """`NAMESPACE.NAME`, by which the model knows the function; a name that is no text stays what it is."""
    name = tool.get("name")
    return f"{namespace['name']}.{name}" if isinstance(name, str) else name


def _is_told(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in ("function", "namespace")


def _whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with every field that the client's types have; a namespace without tools that are left out."""
    if tool.get("type") == "namespace":
        inner = [_whole_tool(one) for one in _functions_of(tool) if _is_told(one)]
        return {"description": "", **tool, "tools": inner}
    return {"description": None, "parameters": None, "strict": False, **tool}


def _choice(given: Any) -> Any:
    """The choice in the chat completions' form."""
    if not isinstance(given, Mapping):
        return given
    if given.get("type") == "allowed_tools":
        tools = given.get("tools")
        named = [_named_tool(one) for one in tools] if isinstance(tools, list) else tools
        allowed = {"mode": given.get("mode") or "auto", "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _named_tool(given)


def _named_tool(given: Any) -> Any:
    """A function by its name, with that of its namespace; what is none stays what it is."""
    if not isinstance(given, Mapping) or given.get("type") != "function":
        return given
    name, namespace = given.get("name"), given.get("namespace")
    full = f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name
    return {"type": "function", "function": {"name": full}}


# ------------------------------------------------------------ the rest


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises InvalidRequestError where it has more pairs, or longer ones, than a response may have."""
    if len(metadata) > MAX_METADATA:
        text = f"metadata has {len(metadata)} pairs, at most {MAX_METADATA} are taken"
        raise InvalidRequestError(text, param="metadata")
    for key, value in metadata.items():
        place = f"metadata.{key[:MAX_METADATA_KEY_CHARS]}"
        if len(key) > MAX_METADATA_KEY_CHARS:
            text = (
                f"{place}...: the key has {len(key)} characters, at most {MAX_METADATA_KEY_CHARS} are taken"
            )
            raise InvalidRequestError(text, param="metadata")
        if len(value) > MAX_METADATA_CHARS:
            text = f"{place} has {len(value)} characters, at most {MAX_METADATA_CHARS} are taken"
            raise InvalidRequestError(text, param=place)


def _whole_format(given: Any) -> Any:
    """The format of the text with every field that the client's types have."""
    if not isinstance(given, Mapping) or given.get("type") is None:
        return {"type": "text"}
    if given["type"] != "json_schema":
        return dict(given)
    return {"name": "", "description": None, "schema": None, "strict": False, **given}


def _template_args(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    """The effort as templates know it."""
    effort = (reasoning or {}).get("effort")
    return {} if effort is None else effort_args(effort)
