"""The headers that stand for body fields (SPEC Q1, S2): class of the request and prefill progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError
from stoker.request import Priority

if TYPE_CHECKING:
    from starlette.requests import Request

PRIORITY_HEADER = "X-Stoker-Priority"
PROGRESS_HEADER = "X-Stoker-Progress"


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
    if request.headers.get(PROGRESS_HEADER) == "1":
        fields["return_progress"] = True
    return fields
