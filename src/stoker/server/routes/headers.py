"""Headers that stand for body fields (SPEC Q1, S2): class of the request, prefill progress, its pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError
from stoker.request import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request

    from stoker.images import ImageReport

PRIORITY_HEADER = "X-Stoker-Priority"
PROGRESS_HEADER = "X-Stoker-Progress"
IMAGES_HEADER = "X-Stoker-Images"
_ON = frozenset({"1", "true", "on", "yes"})


def header_fields(request: Request) -> dict[str, Any]:
    """Keyword arguments of a `GenerateRequest` that the headers set; they beat the body.

    Raises:
        InvalidRequestError: no class has that name.
    """
    fields: dict[str, Any] = {}
    name = request.headers.get(PRIORITY_HEADER)
    if name is not None:
        if name not in list(Priority):
            raise InvalidRequestError(
                f"{PRIORITY_HEADER} is {name[:40]!r}; known: {', '.join(Priority)}", param=PRIORITY_HEADER
            )
        fields["priority"] = Priority(name)
    if request.headers.get(PROGRESS_HEADER, "").strip().lower() in _ON:
        fields["return_progress"] = True
    return fields


def images_header(images: Iterable[ImageReport]) -> str:
    """What became of each picture: `320x240`, or `4000x3000>448x336` where it was shrunk (SPEC V3)."""
    return ", ".join(
        "x".join(map(str, (one.width, one.height)))
        + (f">{one.shrunk_to[0]}x{one.shrunk_to[1]}" if one.shrunk_to else "")
        for one in images
    )
