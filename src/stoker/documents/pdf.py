"""The text of a PDF, page by page (SPEC V12). Runs in a worker process alone: a PDF is a stranger's program.

Owns the bounds on pages and characters, and what is said of one that cannot be read. Time and memory are
bounded by the process.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker.documents.formats import cleaned
from stoker.errors import InvalidRequestError, StokerError, UnsupportedError
from stoker.wording import count_text

if TYPE_CHECKING:
    from pypdf import PdfReader

_MAX_REASON_CHARS = 120


def pages_of(data: bytes, label: str, param: str, max_pages: int, max_chars: int) -> list[str]:
    """The text of each page; empty for one without text.

    Args:
        data: the whole file.
        label: names the document in errors.
        param: its place in the request.
        max_pages: it may have.
        max_chars: its text may have.

    Raises:
        InvalidRequestError: it is damaged, encrypted, over a bound, or has no text.
        UnsupportedError: it is encrypted in a way that is not read here.
    """
    from pypdf import PdfReader  # noqa: PLC0415 - half a megabyte of modules, for documents alone

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # a line for each thing that is wrong with a file
    with _refusing(f"{label} cannot be read", param):
        reader = PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted:
            _decrypt(reader, label, param)
    with _refusing(f"the pages of {label} cannot be read", param):
        num_pages = len(reader.pages)
    if not 0 < num_pages <= max_pages:
        text = f"{label} has {count_text(num_pages, 'page')}, 1 to {max_pages} are taken"
        raise InvalidRequestError(text, param=param)
    pages: list[str] = []
    num_chars = 0
    for number in range(1, num_pages + 1):
        with _refusing(f"page {number} of {num_pages} of {label} cannot be read", param):
            pages.append(cleaned(reader.pages[number - 1].extract_text()))
        num_chars += len(pages[-1])
        if num_chars > max_chars:
            text = f"{label} has {num_chars} characters on the first {number} of {num_pages} pages"
            raise InvalidRequestError(f"{text}, at most {max_chars} are taken", param=param)
    if not any(map(str.strip, pages)):
        text = f"{label} has no text on {count_text(num_pages, 'page')}, perhaps it is a scan"
        raise InvalidRequestError(f"{text}: send its pages as pictures", param=param)
    return pages


@contextlib.contextmanager
def _refusing(what: str, param: str) -> Iterator[None]:
    """Whatever a broken file makes the library raise within the block is the caller's error."""
    try:
        yield
    except (StokerError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - they are of any kind
        raise InvalidRequestError(f"{what}: {_reason(error)}", param=param) from None


def _decrypt(reader: PdfReader, label: str, param: str) -> None:
    """Open one that needs no password, as viewers do."""
    from pypdf.errors import DependencyError  # noqa: PLC0415 - likewise

    try:
        is_open = bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError) as error:
        text = f"{label} is encrypted in a way that is not read here: {_reason(error)}; save it without"
        raise UnsupportedError(text, param=param) from None
    if not is_open:
        text = f"{label} is encrypted and needs a password: save it without one"
        raise InvalidRequestError(text, param=param)


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON_CHARS] or type(error).__name__
