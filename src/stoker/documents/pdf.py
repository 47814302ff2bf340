"""The text of a PDF, page by page (SPEC V12). Runs in a worker process alone: a PDF is a stranger's program.

Owns the bounds on pages, characters, unpacked bytes and parts, and what is said of one that cannot be read.
Time and memory are bounded by the process.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker.documents.formats import cleaned
from stoker.errors import InvalidRequestError, StokerError, UnsupportedError, WorkLimitError
from stoker.wording import count_text

if TYPE_CHECKING:
    from pypdf import PdfReader

MAX_UNPACKED_BYTES = 64 * 2**20
"""Of one stream, such as a page's."""
MAX_ENTRIES = 100_000
"""Of a list, a table or the tree of pages."""
MAX_PAGE_TOKENS = 2_000_000
"""Operators and operands of one page."""
_UNPACKING = ("zlib", "lzw", "run_length", "brotli", "array_based_stream")
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
        WorkLimitError: it unpacks to more than is taken, or there is too much on a page or in a list.
        UnsupportedError: it is encrypted in a way that is not read here.
    """
    from pypdf import apply_configuration  # noqa: PLC0415 - half a megabyte of modules, for documents alone

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # a line for each thing that is wrong with a file
    with apply_configuration(**_bounds()):
        pages = _texts(data, label, param, max_pages, max_chars)
    if not any(map(str.strip, pages)):
        text = f"{label} has no text on {count_text(len(pages), 'page')}, perhaps it is a scan"
        raise InvalidRequestError(f"{text}: send its pages as pictures", param=param)
    return pages


def _texts(data: bytes, label: str, param: str, max_pages: int, max_chars: int) -> list[str]:
    """The text of each page, within the library's bounds as they are set; raises as `pages_of`."""
    from pypdf import PdfReader  # noqa: PLC0415 - likewise

    with _refusing(f"{label} cannot be read", param):
        reader = PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted:
            _decrypt(reader, label, param)
    with _refusing(f"{label}: its pages cannot be read", param):
        num_pages = len(reader.pages)
    if not 0 < num_pages <= max_pages:
        text = f"{label} has {count_text(num_pages, 'page')}, 1 to {max_pages} are taken"
        raise InvalidRequestError(text, param=param)
    pages: list[str] = []
    num_chars = 0
    for number in range(1, num_pages + 1):
        with _refusing(f"{label}: page {number} of {num_pages} cannot be read", param):
            pages.append(cleaned(reader.pages[number - 1].extract_text()))
        num_chars += len(pages[-1])
        if num_chars > max_chars:
            text = f"{label} has {num_chars} characters on the first {number} of {num_pages} pages"
            raise InvalidRequestError(f"{text}, at most {max_chars} are taken", param=param)
    return pages


def _bounds() -> dict[str, int]:
    """The library's settings that are bounds of ours; what more it has is for its own defence."""
    return {
        **{f"{name}_maximum_output_length": MAX_UNPACKED_BYTES for name in _UNPACKING},
        "array_maximum_element_count": MAX_ENTRIES,
        "dictionary_maximum_element_count": MAX_ENTRIES,
        "page_tree_maximum_entries": MAX_ENTRIES,
        "stream_parsing_work_maximum_count": MAX_PAGE_TOKENS,
    }


@contextlib.contextmanager
def _refusing(what: str, param: str) -> Iterator[None]:
    """Whatever a broken file makes the library raise within the block is the caller's error."""
    from pypdf.errors import LimitReachedError  # noqa: PLC0415 - likewise

    try:
        yield
    except (StokerError, MemoryError):
        raise
    except LimitReachedError:
        raise WorkLimitError(
            f"{what}: it takes more than {MAX_UNPACKED_BYTES // 2**20} MiB unpacked, {MAX_ENTRIES} entries of"
            f" a list or {MAX_PAGE_TOKENS} operators and operands on a page; send fewer of its pages",
            param=param,
            limit_bytes=MAX_UNPACKED_BYTES,
            max_entries=MAX_ENTRIES,
            max_page_tokens=MAX_PAGE_TOKENS,
        ) from None
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
