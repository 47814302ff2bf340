"""A document that an application gives: a path, bytes, or a `data:` URI.

Owns telling these apart. What it is made of is found by `formats`, what a model is shown of it by `turns`.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any, TypeAlias

from stoker.documents.limits import DEFAULT_LIMITS, DocumentLimits
from stoker.errors import InvalidRequestError
from stoker.images.sources import Encoded, read_reference

_Source: TypeAlias = "str | os.PathLike[str] | bytes"
_DATA = "data:"
DEFAULT_NAME = "document"


class Document:
    """One document, a PDF or text; nothing is read before `encoded` is called.

    Args:
        source: a path, the bytes of a file, a `data:` URI, or another Document.
        name: what the model and errors call it; None: its file name, or "document".
        title: as the model is told; empty: it is not.
        context: what is to be known of it, likewise.
    """

    def __init__(
        self, source: _Source | Document, *, name: str | None = None, title: str = "", context: str = ""
    ) -> None:
        if isinstance(source, Document):
            name, title, context = name or source.name, title or source.title, context or source.context
            source = source.source
        self._source: _Source = source
        self.name: str = name or _name_of(source)
        self.title: str = title
        self.context: str = context

    def __repr__(self) -> str:
        return f"Document({self.name})"

    @property
    def source(self) -> _Source:
        """What it was made of."""
        return self._source

    def encoded(self, limits: DocumentLimits = DEFAULT_LIMITS) -> Encoded:
        """The file as it is, at most one byte over `max_bytes`, and the type that came with it.

        Raises:
            InvalidRequestError: it cannot be read.
        """
        source = self._source
        if isinstance(source, bytes):
            return Encoded(source)
        if isinstance(source, str) and source[: len(_DATA)].lower() == _DATA:
            return read_reference(source, limits, self.name)
        try:
            with Path(source).expanduser().open("rb") as file:
                return Encoded(file.read(limits.max_bytes + 1))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            text = f"{source}: the document cannot be read: {reason}"
            raise InvalidRequestError(text, param="document") from None

    def file_part(self, limits: DocumentLimits = DEFAULT_LIMITS) -> dict[str, Any]:
        """The part of a message that holds it, for a request to a server. Raises as `encoded` does."""
        given = self.encoded(limits)
        declared = given.declared or "application/octet-stream"
        data = f"{_DATA}{declared};base64,{base64.b64encode(given.data).decode('ascii')}"
        told = {"title": self.title, "context": self.context}
        about = {name: value for name, value in told.items() if value}
        return {"type": "file", "file": {"filename": self.name, "file_data": data, **about}}


def _name_of(source: _Source) -> str:
    if isinstance(source, bytes):
        return DEFAULT_NAME
    text = os.fspath(source)
    return DEFAULT_NAME if text[: len(_DATA)].lower() == _DATA else Path(text).name
