"""Fields of bodies that a route does not know: told in a header of the answer, and once in the log.

They are ignored, as other servers do and clients rely on; who has mistyped one finds it there. Objects of the
body itself are looked into; lists are not, as turns come back from clients with what other vendors put there.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel
from starlette.requests import Request

log = logging.getLogger(__name__)

MAX_TOLD = 256
"""Names that the log tells of in all: a stranger may make up any number."""
_MAX_NAMED = 8
_MAX_NAME_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")


class UnknownFields:
    """What one server has told of unknown fields."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"UnknownFields({len(self._told)} told)"

    def tell(self, request: Request, names: Iterable[str], known: Iterable[str]) -> None:
        """Have the answer to `request` name these fields, and the log those that it has not named yet."""
        shown = [_UNSAFE.sub("?", name[:_MAX_NAME_CHARS]) for name in names]
        request.state.ignored = [*getattr(request.state, "ignored", ()), *shown]
        path = request.scope["route"].path
        for name in shown:
            if len(self._told) < MAX_TOLD and (path, name) not in self._told:
                self._told.add((path, name))
                alike = difflib.get_close_matches(name, known, 1)
                hint = f"; did a client mean {alike[0]!r}?" if alike else ""
                log.warning("%s ignores the unknown field %r%s", path, name, hint)


def ignored_names(names: list[str]) -> str:
    """The value of the header; a few of them where there are many."""
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])


def unknown_names(model: type[BaseModel], document: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Paths of what `document` holds and `model` does not know."""
    known = known_names(model)
    for name, value in document.items():
        if name not in known:
            yield within + name
        elif (inner := known[name]) is not None and isinstance(value, dict):
            yield from unknown_names(inner, value, f"{within}{name}.")


@cache
def known_names(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The names that a body may use, each with the model of the object that stands there, if one does."""
    found: dict[str, type[BaseModel] | None] = {}
    for name, field in model.model_fields.items():
        aliases = field.validation_alias
        names = aliases.choices if isinstance(aliases, AliasChoices) else [aliases or field.alias or name]
        inner = _model_in(field.annotation)
        found |= {str(one): inner for one in names}
    return found


def _model_in(kind: Any) -> type[BaseModel] | None:
    """The one model that a value of that type may be; None: it may be some other object, or none."""
    kinds = get_args(kind) or (kind,)
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
