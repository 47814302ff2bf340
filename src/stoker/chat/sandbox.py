"""The Jinja sandbox that chat templates run in.

A template arrives inside a model file, so it is foreign code in the process that holds every live request.
Owns what such code may reach and how much it may compute: no private attributes, no mutation, a bounded
number of loop turns and macro calls, no value longer than a bound, no time over a deadline. Leaves which
variables a template gets, and what its errors mean to a caller, to `stoker.chat.template`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import wraps
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, Never

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_TEMPLATE_CHARS = 512 * 1024  # the longest published ones are around 30,000
MAX_VALUE_CHARS = 32 * 1024**2  # four times the largest request body
MAX_TURNS = 200_000  # loop turns and macro calls of one rendering: under a second
MAX_RENDER_S = 10.0
MAX_INT_BITS = 128
MAX_INDENT = 64

_BUDGET = "stoker budget"  # not an identifier, so no template can name it
_WIDTHS = re.compile(r"\d{4,}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")
_GROWING_METHODS = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"})
_GROWING_FILTERS = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_TEXT_FILTERS = [
    "capitalize",
    "escape",
    "e",
    "float",
    "forceescape",
    "int",
    "lower",
    "safe",
    "string",
    "striptags",
    "title",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
]


class Budget:
    """Loop turns and time that one rendering has left."""

    def __init__(self, max_turns: int = MAX_TURNS, max_render_s: float = MAX_RENDER_S) -> None:
        self._turns_left = max_turns
        self._deadline = time.monotonic() + max_render_s

    def __repr__(self) -> str:
        return f"Budget(turns_left={self._turns_left})"

    def spend(self) -> None:
        """Take one turn. Raises SecurityError when none or no time is left."""
        self._turns_left -= 1
        if self._turns_left < 0:
            raise SecurityError("the template loops without end")
        if self._turns_left % 256 == 0 and time.monotonic() > self._deadline:
            raise SecurityError("the template takes too long")

    def as_variables(self) -> dict[str, Any]:
        """What a rendering has to be given for its turns to be counted."""
        return {_BUDGET: self}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (the conventions of transformers), with the bounds above."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//", "-"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_check_spelled,
            extensions=[loopcontrols, _GenerationTag],
        )
        for name in _GROWING_FILTERS:
            del self.filters[name]
        self.filters |= {name: _measured(self.filters[name]) for name in _TEXT_FILTERS}
        self.filters |= {
            "format": _format,
            "indent": _bounded_indent(self.filters["indent"]),
            "join": _bounded_join(self.filters["join"]),
            "replace": _bounded_replace(self.filters["replace"]),
            "tojson": _tojson,
        }
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a block or macro wrote."""
        whole = list(parts)
        _check_size(sum(map(len, whole)))
        return "".join(whole)

    @pass_context
    def spend_turn(self, context: Context) -> str:
        """Called at the start of every loop turn and macro call."""
        context.parent[_BUDGET].spend()
        return ""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Never:
        """Refuse at the first touch instead of handing out an undefined value."""
        raise SecurityError(f"the template reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The library's safe `str.format`, refused for formats that pad without bound."""
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str):
            _check_method(value.__self__, value.__name__, ())
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, refused where its result would be out of bounds."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_spelled(right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_bits(_bits(left) * (abs(right) if isinstance(right, int) else 1))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        _check_bits(_bits(result))
        return result

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `obj`, unless it is a text method whose result would be out of bounds."""
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            _check_method(text, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the library's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Puts a counted turn in front of every loop and macro body, and sends `~` through the bounded join."""

    def _metered(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        turn = nodes.Call(nodes.EnvironmentAttribute("spend_turn"), [], [], None, None, lineno=node.lineno)
        node.body = [nodes.ExprStmt(turn, lineno=node.lineno), *node.body]
        result: nodes.Node = node
        return result

    visit_For = visit_Macro = visit_CallBlock = _metered  # noqa: N815 - the visitor's naming

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - likewise
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


def _check_size(size: int) -> None:
    if size > MAX_VALUE_CHARS:
        raise SecurityError(
            f"the template builds a value of {size} characters, at most {MAX_VALUE_CHARS} are allowed"
        )


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise SecurityError(f"the template computes a number of more than {MAX_INT_BITS} bits")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int):
            _check_size(len(sequence) * times)


def _check_format(text: str) -> None:
    if _WIDTHS.search(text):
        raise SecurityError("the template pads a value with a computed width or one of more than 999")


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _GROWING_METHODS:
        raise SecurityError(f"the template calls {name}() of a text, which is not allowed")
    if name == "format":
        _check_format(text)
    elif name == "replace" and len(args) > 1:
        _check_size(_replaced_size(text, args[0], args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _check_size(_joined_size(args[0], text))


def _replaced_size(text: str, old: Any, new: Any) -> int:
    return len(text) + text.count(str(old)) * len(str(new))


def _joined_size(parts: Iterable[Any], separator: str) -> int:
    return sum(
        len(part if isinstance(part, str) else str(_check_spelled(part))) + len(separator) for part in parts
    )


def _bounded_join(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
        parts = list(value)
        if attribute is None:
            _check_size(_joined_size(parts, str(d)))
        else:
            _check_spelled(parts)
            _check_size(len(parts) * len(str(d)))
        return original(context.eval_ctx, parts, str(d), attribute)

    return join


def _check_spelled(value: Any) -> Any:
    """`value`, unless writing it as text would be out of bounds: lists may hold one long text many times."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        size += len(item) if hasattr(item, "__len__") else 1
        _check_size(size)
        if isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            rest += item
    return value


def _measured(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)  # keeps the marks by which Jinja passes its context
    def measured(*args: Any, **kwargs: Any) -> Any:
        for value in args[-1:] if len(args) < 2 else args[:2]:  # noqa: PLR2004 - the value comes first or second
            _check_spelled(value)
        return original(*args, **kwargs)

    return measured


def _bounded_replace(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> Any:
        _check_size(_replaced_size(str(_check_spelled(value)), old, new))
        return original(context.eval_ctx, value, old, new, count)

    return replace


def _bounded_indent(original: Callable[..., Any]) -> Callable[..., Any]:
    def indent(value: str, width: int | str = 4, first: Any = False, blank: Any = False) -> Any:  # noqa: FBT002 - Jinja's signature
        if (len(width) if isinstance(width, str) else width) > MAX_INDENT:
            raise SecurityError(f"the template indents by more than {MAX_INDENT} characters")
        return original(value, width, first, blank)

    return indent


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    _check_spelled([args, kwargs])
    return value % (kwargs or args)


def _tojson(value: Any, **options: Any) -> str:
    """JSON as text for a model: no HTML escapes, non-ASCII left as it is (transformers' convention)."""
    if isinstance(indent := options.get("indent"), int) and indent > MAX_INDENT:
        raise SecurityError(f"the template indents by more than {MAX_INDENT} characters")
    allowed = {
        key: options[key] for key in ("indent", "separators", "sort_keys", "ensure_ascii") if key in options
    }
    return json.dumps(_check_spelled(value), **{"ensure_ascii": False, **allowed})


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now(UTC).astimezone().strftime(pattern)


def _raise_exception(message: str) -> Never:
    raise TemplateError(message)
