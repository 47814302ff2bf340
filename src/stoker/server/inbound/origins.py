"""Pages that may call the server (SPEC S4): its own, and those of origins that its owner lists (CORS).

Pure: header values in, header values out; `gate` applies them. A browser sends Origin with what a page of
another origin asks for, and shows the answer to the page only if the answer allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import ForbiddenError
from stoker.server.headers import IGNORED_HEADER, IMAGES_HEADER
from stoker.server.streaming.delivery import CACHE_HEADER, ETA_HEADER, POSITION_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANY = "*"
_OWN = (POSITION_HEADER, ETA_HEADER, CACHE_HEADER, IMAGES_HEADER, IGNORED_HEADER)
_EXPOSED = ", ".join(("X-Request-Id", "Request-Id", "Retry-After", *_OWN)).encode()
_METHODS = b"GET, POST, DELETE"
_MAX_AGE_S = b"600"
_VARY = b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


@dataclass(frozen=True, slots=True)
class Visit:
    """A request as far as its Origin goes.

    Attributes:
        is_foreign: it comes from a page of a listed origin.
        is_preflight: the browser only asks whether the page may send something; `headers` are the answer.
        headers: of its answer, so that the page may read it.
    """

    is_foreign: bool = False
    is_preflight: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Origins:
    """Origins whose pages may call.

    Args:
        listed: such as `https://chat.example`; `*` is every one, `null` that of files and sandboxed frames.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._listed = frozenset(listed)

    def __repr__(self) -> str:
        return f"Origins({sorted(self._listed)})"

    def visit(self, method: str, scheme: str, headers: Mapping[bytes, list[bytes]]) -> Visit:
        """What a request's Origin means for it.

        Args:
            method: of the request.
            scheme: http, or https where a proxy of this machine says so.
            headers: values by name in lower case.

        Raises:
            ForbiddenError: a page of another origin sends it, and that one is not listed.
        """
        own = f"{scheme}://{_text(headers.get(b'host', []))}".lower()
        foreign = [origin for each in headers.get(b"origin", ()) if (origin := _text([each]).lower()) != own]
        strange = [origin for origin in foreign if not self._listed.intersection((origin, ANY))]
        if strange:
            raise ForbiddenError(
                f"Origin {strange[0][:99]!r} is neither the server's own, {own[:99]!r}, nor listed by the"
                " owner with --cors-origin"
            )
        if not foreign:
            return Visit(headers=self._vary())
        allowed = b"*" if ANY in self._listed else foreign[0].encode("latin-1")
        shown = (b"access-control-allow-origin", allowed)
        if method == "OPTIONS" and b"access-control-request-method" in headers:
            return Visit(is_foreign=True, is_preflight=True, headers=(shown, *_preflight(headers)))
        exposed = (b"access-control-expose-headers", _EXPOSED)
        return Visit(is_foreign=True, headers=(shown, exposed, *self._vary()))

    def _vary(self) -> tuple[tuple[bytes, bytes], ...]:
        """For caches: another origin has another answer."""
        return ((b"vary", b"Origin"),) if self._listed - {ANY} else ()


def _preflight(headers: Mapping[bytes, list[bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    found = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _MAX_AGE_S),
        (b"vary", _VARY),
    ]
    if asked := headers.get(b"access-control-request-headers"):
        found.append((b"access-control-allow-headers", b", ".join(asked)))
    if headers.get(b"access-control-request-private-network") == [b"true"]:
        found.append((b"access-control-allow-private-network", b"true"))
    return tuple(found)


def _text(values: list[bytes]) -> str:
    return values[0].decode("latin-1") if values else ""
