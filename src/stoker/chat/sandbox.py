"""The Jinja sandbox that chat templates run in.

A template arrives inside a model file, so it is foreign code. Owns what such code may reach (no private
attributes, no mutation, nothing of this program) and how many loop turns it may take. The worker process that
it runs in bounds what one call of a built-in costs in time and memory; `stoker.chat.template` decides which
variables a template gets and what its errors mean to a caller.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Never

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_TEMPLATE_CHARS = 512 * 1024  # the longest published ones are around 30,000
MAX_PROMPT_CHARS = 32 * 1024**2  # as many as the largest request body has
MAX_TURNS = 200_000  # loop turns and macro calls of one rendering: under a second

_BUDGET = "stoker budget"  # not an identifier, so no template can name it
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
    return json.dumps(value, **{"ensure_ascii": False, **allowed})


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).astimezone().strftime(pattern)


def _raise_exception(message: str) -> Never:
    raise TemplateError(message)
