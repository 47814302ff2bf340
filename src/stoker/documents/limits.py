"""What the documents of a request may cost (SPEC V12). Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from stoker.settings import EngineSettings

MAX_DOCUMENTS = 16
"""Of one request."""
MAX_NAME_CHARS = 200
"""Of a file's name, and of its title."""
MAX_CONTEXT_CHARS = 8192
"""Of what a caller says about a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLimits:
    """Bounds of the documents of one request.

    Attributes:
        max_bytes: of one file.
        max_pages: of one file.
        max_chars: of the text of all files together.
        max_s: seconds that one file is read for.
        roots: folders that files may be read from; none: no files.
        can_fetch: http and https addresses are fetched.
    """

    noun: ClassVar[str] = "document"
    accept: ClassVar[str] = "application/pdf, text/*, application/json"

    max_bytes: int = 20 * 2**20
    max_pages: int = 500
    max_chars: int = 1_000_000
    max_s: int = 20
    roots: tuple[Path, ...] = ()
    can_fetch: bool = False

    @classmethod
    def of(cls, settings: EngineSettings) -> DocumentLimits:
        """As the settings say; where files may come from they say of images."""
        return cls(
            max_bytes=settings.max_document_bytes,
            max_pages=settings.max_document_pages,
            max_chars=settings.max_document_chars,
            max_s=settings.max_document_seconds,
            roots=tuple(Path(root).expanduser() for root in settings.image_roots),
            can_fetch=settings.allow_http_images,
        )


DEFAULT_LIMITS = DocumentLimits()
