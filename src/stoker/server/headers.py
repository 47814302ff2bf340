"""Headers that stand for body fields (SPEC Q1, S2), and what answers say of pictures and ignored tools."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError
from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request

    from stoker.chat.tools.tools import LeftOut
    from stoker.images import ImageReport

PRIORITY_HEADER = "X-Stoker-Priority"
PROGRESS_HEADER = "X-Stoker-Progress"
IMAGES_HEADER = "X-Stoker-Images"
IGNORED_HEADER = "X-Stoker-Ignored"

_YES = frozenset({"1", "true", "on", "yes"})
_NO = frozenset({"0", "false", "off", "no", ""})
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")
_MAX_NAMED = 8  # it is a value of a response's metadata too, which OpenAI bounds at 512 characters
_MAX_KIND_CHARS = 40


def header_fields(request: Request) -> dict[str, Any]:
    """Keyword arguments of a `GenerateRequest` that the headers set; they beat the body.

    Raises:
        InvalidRequestError: no class has that name, or the progress is neither on nor off.
    """
    fields: dict[str, Any] = {}
    name = request.headers.get(PRIORITY_HEADER)
    if name is not None:
        if name not in list(Priority):
            raise InvalidRequestError(
                f"{PRIORITY_HEADER} is {name[:40]!r}; known: {', '.join(Priority)}", param=PRIORITY_HEADER
            )
        fields["priority"] = Priority(name)
    progress = request.headers.get(PROGRESS_HEADER)
    if progress is not None:
        fields["return_progress"] = _is_on(PROGRESS_HEADER, progress)
    return fields


def _is_on(header: str, value: str) -> bool:
    word = value.strip().lower()
    if word not in _YES | _NO:
        raise InvalidRequestError(
            f"{header} is {value[:40]!r}; known: 1, true, on, yes and 0, false, off, no", param=header
        )
    return word in _YES


def images_header(images: Iterable[ImageReport]) -> str:
    """What became of each picture: `320x240`, or `4000x3000>448x336` where it was shrunk (SPEC V3)."""
    return ", ".join(
        "x".join(map(str, (one.width, one.height)))
        + (f">{one.shrunk_to[0]}x{one.shrunk_to[1]}" if one.shrunk_to else "")
        for one in images
    )


def ignored_header(left_out: Sequence[LeftOut]) -> str:
    """Which tools the model was not told of: `tools.4 (web_search), tools.5 (custom)`."""
    named = [f"{one.where} ({_UNSAFE.sub('?', one.kind[:_MAX_KIND_CHARS])})" for one in left_out[:_MAX_NAMED]]
    if len(left_out) > _MAX_NAMED:
        named.append(f"{len(left_out) - _MAX_NAMED} more")
    return ", ".join(named)
