"""Chat messages to one prompt, by the template that the model brought along, in a sandbox.

Owns the variables a template gets and the meaning of its errors. A model without a template gets ChatML, a
format that it may not know. The tokenizer makes tokens of the text; a rendered prompt already holds its
special tokens. Which forms of a conversation are tried is `turns`' business.

A template arrives inside a model file, so it is foreign code. `TemplateEnvironment` is the Jinja sandbox:
what such code may reach (no private attributes, nothing of this program, no mutation but of lists, which its
rendering alone has) and how many loop turns it may take. The worker process that it runs in bounds what one
call of a built-in costs in time and memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Never

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from stoker.chat.turns import text_of
from stoker.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context


MAX_TEMPLATE_CHARS = 512 * 1024  # the longest published ones are around 30,000
MAX_PROMPT_CHARS = 32 * 1024**2  # as many as the largest request body has
MAX_TURNS = 200_000  # loop turns and macro calls of one rendering: under a second

_BUDGET = "stoker budget"  # not an identifier, so no template can name it
_LIST_METHODS = frozenset({"append", "pop"})
"""Those of Kimi K2 keep a queue of ids. Turns and the worker bound it, as all else."""
_JSON_OPTIONS = ("indent", "separators", "sort_keys", "ensure_ascii")


class RenderBudget:
    """Loop turns that one rendering has left."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        self._turns_left = max_turns

    def __repr__(self) -> str:
        return f"Budget(turns_left={self._turns_left})"

    def spend(self) -> None:
        """Take one turn. Raises SecurityError when none is left."""
        self._turns_left -= 1
        if self._turns_left < 0:
            raise SecurityError("the template loops without end")

    def as_variables(self) -> dict[str, Any]:
        """What a rendering has to be given for its turns to be counted."""
        return {_BUDGET: self}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (the conventions of transformers), with the bounds above."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return tree

    @pass_context
    def spend_turn(self, context: Context) -> str:
        """Called at the start of every loop turn and macro call."""
        context.parent[_BUDGET].spend()
        return ""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox has it; a list may grow and shrink, as no rendering gets one that another sees."""
        return (isinstance(obj, list) and attr in _LIST_METHODS) or super().is_safe_attribute(
            obj, attr, value
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Never:
        """Refuse at the first touch instead of handing out an undefined value."""
        raise SecurityError(f"the template reaches for {attribute!r} of a {type(obj).__name__}")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the library's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Puts a counted turn in front of every loop and macro body."""

    def _metered(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        turn = nodes.Call(nodes.EnvironmentAttribute("spend_turn"), [], [], None, None, lineno=node.lineno)
        node.body = [nodes.ExprStmt(turn, lineno=node.lineno), *node.body]
        result: nodes.Node = node
        return result

    visit_For = visit_Macro = visit_CallBlock = _metered  # noqa: N815 - the visitor's naming


def _tojson(value: Any, **options: Any) -> str:
    """JSON as text for a model: no HTML escapes, non-ASCII left as it is (transformers' convention)."""
    allowed = {name: options[name] for name in _JSON_OPTIONS if name in options}
    return json.dumps(value, default=_listed, **{"ensure_ascii": False, **allowed})


def _listed(value: Any) -> list[Any]:
    """What a filter such as `map` gives is a list in JSON, as in llama.cpp."""
    if not isinstance(value, GeneratorType):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).astimezone().strftime(pattern)


def _raise_exception(message: str) -> Never:
    raise TemplateError(message)


log = logging.getLogger(__name__)

MAX_MESSAGES = 10_000
_PROBE = "a probe of the template"
_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "raise_exception", "strftime_now"})


class ChatTemplate:
    """One model's chat template.

    Args:
        source: Jinja source.
        bos_text: the beginning-of-sequence token as text.
        eos_text: the end-of-sequence token as text.
    """

    def __init__(self, source: str, bos_text: str = "", eos_text: str = "") -> None:
        self._source = source
        self._bos_text = bos_text
        self._eos_text = eos_text

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self._source)} characters)"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`.

        Args:
            messages: each with a `role` and a `content`: text, None, or OpenAI content parts.
            tools: function declarations in OpenAI's form, for templates that know them.
            extra: further variables of the template, such as `enable_thinking`; `add_generation_prompt` is
                true where they do not have it: the prompt ends with the opening of the assistant's turn.

        Raises:
            InvalidRequestError: malformed messages, or the template refused or failed on them; its own
                message is kept.
            UnsupportedError: the template itself is broken, so this model cannot chat.
        """
        checked = _checked_messages(messages)
        variables = {  # lists and dicts are copied: this rendering may change its lists
            "add_generation_prompt": True,
            **msgspec.to_builtins(_checked_extra(extra)),
            "messages": msgspec.to_builtins([*map(_in_parts, checked)] if self._wants_parts else checked),
            "tools": msgspec.to_builtins(tools) if tools else None,
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
        }
        template = self._compiled
        try:
            return "".join(_bounded(template.generate(**variables, **RenderBudget().as_variables())))
        except TemplateError as error:
            reason = error.message or type(error).__name__
            text = f"the chat template refused the messages: {reason}"
            raise InvalidRequestError(text, param="messages") from error
        except MemoryError:  # the worker process turns it into an error that names the bound
            raise
        except Exception as error:  # a template is foreign code; whatever it trips over, the caller hears
            text = f"the chat template failed on the messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(text, param="messages") from error

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether it writes the text of parts and not that of strings, as those of models that see may."""
        asked = {"role": "user", "content": _PROBE}
        return "type" in self._source and not self._writes(asked) and self._writes(_in_parts(asked))

    def _writes(self, message: Mapping[str, Any]) -> bool:
        """Whether the probe's text is in a prompt."""
        tokens = {"bos_token": self._bos_text, "eos_token": self._eos_text}
        variables = {"messages": [dict(message)], "tools": None, "add_generation_prompt": True, **tokens}
        try:
            written = _bounded(self._compiled.generate(**variables, **RenderBudget().as_variables()))
            return _PROBE in "".join(written)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - what it trips over is told when it is rendered
            log.debug("a chat template does not take the probe: %s", error)
            return False

    @cached_property
    def _compiled(self) -> Template:
        if len(self._source) > MAX_TEMPLATE_CHARS:
            raise UnsupportedError(
                f"the model's chat template has {len(self._source)} characters, "
                f"at most {MAX_TEMPLATE_CHARS} are taken"
            )
        try:
            return TemplateEnvironment().from_string(self._source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise UnsupportedError(f"the model's chat template is broken: {error}") from error


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT_CHARS:
            raise TemplateError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
        yield piece


def _checked_extra(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in sorted(_RESERVED & extra.keys()):
        raise InvalidRequestError(f"the template variable {name!r} cannot be set", param=name)
    return extra


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries, 1 to {MAX_MESSAGES} are taken", param="messages"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] has no role", param=f"messages[{index}].role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content}
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(
            f"messages[{index}].content is neither text nor a list of parts",
            param=f"messages[{index}].content",
        )
    texts = [part.get("text") if part.get("type") == "text" else None for part in content]
    if all(isinstance(text, str) for text in texts):  # most templates know text only
        return {**message, "content": text_of(content)}
    return {**message, "content": list(content)}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text as one part; others as they are."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


@lru_cache(maxsize=64)
def template_of(source: str, bos_text: str, eos_text: str) -> ChatTemplate:
    """The template of a model, compiled once. Raises what `ChatTemplate` raises."""
    return ChatTemplate(source, bos_text=bos_text, eos_text=eos_text)
