"""docs/api.md: the public names of `stoker`, made from signatures and docstrings."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, is_typeddict

import msgspec
import pydantic
from tools.reference_pages.markdown import MADE, docstring_of, sentence, table

import stoker
from stoker import errors, sync
from stoker.tasks import ask, batch, choose, embed, fields, form, rerank, run_tools, states
from stoker.tasks.states import States

HEAD = f"""# Library

{MADE}
Everything below is imported from `stoker`. Calls of `Runtime` are coroutines (`await`) or, where they
yield, asynchronous iterators (`async for`); `stoker.sync.Runtime` has them as plain calls and iterators,
all but `ended`, `group` and `prepare_chat`. [library.md](library.md) shows how they are used,
[errors.md](errors.md) what they raise.
"""
KEYWORDS = """
## Keyword arguments of calls

What `**fields` of a call takes.
"""
LINE = 100


def api_page() -> str:
    """The page."""
    names = sorted(stoker.__all__, key=lambda name: (name != "Runtime", name.lower()))
    things = [(name, getattr(stoker, name)) for name in names] + [("States", States)]
    classes = [(name, thing) for name, thing in things if isinstance(thing, type) and not _is_error(thing)]
    rest = [(name, thing) for name, thing in things if isinstance(thing, FunctionType)]
    aliases = [
        (name, thing) for name, thing in things if not isinstance(thing, type | ModuleType | FunctionType)
    ]
    listed = ", ".join(f"[{name}](#{name.lower()})" for name, _ in (*classes, *rest))
    parts = [HEAD, f"\n{listed}\n"]
    parts += [_class(name, thing) for name, thing in classes]
    parts += [f"\n## {name}\n\n{_signature(name, thing)}\n{docstring_of(thing)}" for name, thing in rest]
    if aliases:
        parts.append(
            "\n## Types\n\n"
            + table(("name", "is"), [(f"`{n}`", f"`{_plain(_written(t))}`") for n, t in aliases])
        )
    parts.append(_keywords())
    parts.append(f"\n## stoker.sync\n\n{docstring_of(sync)}")
    return "".join(parts)


def _is_error(thing: type) -> bool:
    return issubclass(thing, errors.StokerError)


def _class(name: str, thing: type) -> str:
    parts = [f"\n## {name}\n\n"]
    if not issubclass(thing, enum.Enum | msgspec.Struct | pydantic.BaseModel):
        parts.append(_signature(name, thing) + "\n")
    parts.append(docstring_of(thing))
    if issubclass(thing, enum.Enum):
        return "".join(
            [*parts, "\n" + ", ".join(f'`{member.name}` ("{member.value}")' for member in thing) + "\n"]
        )
    if issubclass(thing, pydantic.BaseModel):
        return "".join([*parts, "\nIts fields: [settings.md](settings.md).\n"])
    if issubclass(thing, msgspec.Struct):
        rows = [
            (f"`{field.name}`", f"`{_plain(_annotation(thing, field.name))}`", _default(field))
            for field in msgspec.structs.fields(thing)
        ]
        parts.append("\n" + table(("field", "type", "default"), rows))
    parts += [_member(*member) for member in _members(thing)]
    return "".join(parts)


def _annotation(thing: type, name: str) -> str:
    found = (inspect.get_annotations(base) for base in thing.__mro__)
    return _written(next(own[name] for own in found if name in own))


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if field.default is msgspec.NODEFAULT:
        return "needed"
    return f"`{str(field.default)!r}`" if isinstance(field.default, enum.Enum) else f"`{field.default!r}`"


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Its own and inherited public methods and properties, in the order in which they stand in the code."""
    seen = set()
    for base in thing.__mro__:
        if not base.__module__.startswith("stoker"):
            continue
        for name, member in base.__dict__.items():
            is_call = isinstance(member, FunctionType | classmethod | staticmethod | property)
            if is_call and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        kind = inspect.signature(member.fget).return_annotation if member.fget else ""
        return f"\n### {name}\n\n`{_plain(_written(kind))}`: {docstring_of(member)}"
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return f"\n### {name}\n\n{_signature(name, function)}\n{docstring_of(function)}"


def _signature(name: str, thing: Any) -> str:
    """As code; one parameter a line where it is long."""
    found = inspect.signature(thing)
    words = _with_stars([each for each in found.parameters.values() if each.name not in {"self", "cls"}])
    returned = "" if isinstance(thing, type) else f" -> {_plain(_written(found.return_annotation))}"
    prefix = "async def " if inspect.iscoroutinefunction(thing) else "def "
    begin, end = f"{prefix}{'__init__' if isinstance(thing, type) else name}(", f"){returned}: ..."
    code = f"{begin}{', '.join(words)}{end}"
    if len(code) > LINE:
        code = "\n".join([begin, *(f"    {word}," for word in words), end])
    if isinstance(thing, type):
        code = f"class {name}:\n{textwrap.indent(code, '    ')}"
    return f"<!-- not run: a signature -->\n```python\n{code}\n```\n"


def _with_stars(parameters: list[inspect.Parameter]) -> list[str]:
    words, has_star = [], False
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            has_star = True
        if each.kind is each.KEYWORD_ONLY and not has_star:
            words.append("*")
            has_star = True
        words.append(_parameter(each))
    return words


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
    kind = "" if each.annotation is each.empty else f": {_plain(_written(each.annotation))}"
    default = each.default
    if default is each.empty:
        return f"{stars}{each.name}{kind}"
    shown = f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else repr(default)
    return f"{stars}{each.name}{kind} = {'...' if len(shown) > LINE // 2 else shown}"


def _plain(text: str) -> str:
    """A type without the modules its parts lie in."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def _keywords() -> str:
    parts = [KEYWORDS]
    found = [
        each
        for module in (form, fields, ask, batch, run_tools, embed, rerank, choose, states)
        for each in vars(module).values()
        if is_typeddict(each)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("Former")
    ]
    for thing in found:
        names = set(thing.__annotations__)
        within = [each for each in found if set(each.__annotations__) < names]
        inherited = {name for each in within for name in each.__annotations__}
        bases = [
            each
            for each in within
            if not any(set(each.__annotations__) < set(o.__annotations__) for o in within)
        ]
        also = " Also those of " + " and ".join(f"`{each.__name__}`" for each in bases) + "." if bases else ""
        own = [name for name in thing.__annotations__ if name not in inherited]
        rows = [(f"`{name}`", f"`{_plain(_written(thing.__annotations__[name]))}`") for name in own]
        parts.append(
            f"\n### {thing.__name__}\n\n{sentence(thing.__doc__)}{also}\n\n" + table(("name", "type"), rows)
        )
    return "".join(parts)


def _written(kind: Any) -> str:
    """A type as its source has it."""
    if isinstance(kind, str):
        return kind
    return str(getattr(kind, "__forward_arg__", None) or inspect.formatannotation(kind))
