"""The page's files, as they are served: one folder, named by a digest of all that is in it.

Owns which files there are, their media types and the headers that keep the page to itself. Files import each
other by relative paths, so a browser that has the index of one version gets no file of another, and may keep
each for good. Who may have the page is `routes`'.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

STATIC = Path(__file__).parent / "static"
PATH = "/ui"
ASSETS = f"{PATH}/assets"
_INDEX = "index.html"
_FOLDER = "{{assets}}"
"""In the index: where the files are."""
_DIGITS = 16
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",  # of a chat: what the user gives it
    "object-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # text of a model never becomes markup
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Page:
    """The files of one folder.

    Attributes:
        digest: of all of them; part of their addresses.
        files: content by path below the folder.
        zipped: the same as gzip, without `index.html`, for browsers that take it.
    """

    digest: str
    files: Mapping[str, bytes]
    zipped: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Page:
        """The page of a folder. Raises OSError: a file cannot be read."""
        found = (path for path in folder.rglob("*") if path.suffix in _MEDIA_TYPES)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)}
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        zipped = {name: gzip.compress(content, mtime=0) for name, content in files.items() if name != _INDEX}
        return cls(digest.hexdigest()[:_DIGITS], files, zipped)

    def index(self) -> Response:
        """The document itself, which is asked for each time."""
        text = self.files[_INDEX].decode().replace(_FOLDER, f"{ASSETS}/{self.digest}")
        return _response(text.encode(), ".html", "no-cache")

    def asset(self, digest: str, name: str, accepted: str = "") -> Response | None:
        """A file of the page by its name below the folder; None: this version has none.

        Args:
            digest: of the version that the browser has the index of.
            name: below the folder.
            accepted: the codings of content that the browser takes, as it says in `Accept-Encoding`.
        """
        if name not in self.zipped or digest != self.digest:
            return None
        is_zipped = "gzip" in accepted
        response = _response((self.zipped if is_zipped else self.files)[name], Path(name).suffix, _FOR_GOOD)
        response.headers["Vary"] = "Accept-Encoding"
        if is_zipped:
            response.headers["Content-Encoding"] = "gzip"
        return response


@functools.cache
def shipped_page() -> Page:
    """The page of this version; read when it is first asked for."""
    return Page.read(STATIC)


def _response(content: bytes, suffix: str, kept: str) -> Response:
    return Response(content, media_type=_MEDIA_TYPES[suffix], headers={**_HEADERS, "Cache-Control": kept})
