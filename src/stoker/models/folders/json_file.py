"""Reads the JSON files of a model's folder within bounds: size, depth, and text that is Unicode."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

from stoker.errors import ModelFileError
from stoker.wording import size_text

if TYPE_CHECKING:
    from pathlib import Path

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 128 << 20
_ESCAPED_SURROGATE = b"\\ud"


def broken(path: Path, reason: str) -> ModelFileError:
    """The error that says what is wrong with a file or folder."""
    return ModelFileError(f"{path}: {reason}", path=str(path))


def regular_size(path: Path) -> int:
    """Bytes of a regular file. Raises ModelFileError for anything else: a pipe would never let go."""
    try:
        found = path.stat()
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise broken(path, "it is not a regular file")
    return found.st_size


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """A file of UTF-8 text. Raises ModelFileError where it is larger, unreadable or no text."""
    return _text(path, _read(path, max_bytes))


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        ModelFileError: it is missing, larger than `max_bytes`, or no such file.
    """
    return parse_object(path, _read(path, max_bytes), "it")


def parse_object(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """Likewise, of bytes of `path` that are called `what`."""
    text = _text(path, data)
    try:
        document = json.loads(text)
        if _ESCAPED_SURROGATE in data.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise broken(path, f"{what} is nested too deep") from None
    except UnicodeEncodeError:
        raise broken(path, f"{what} holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise broken(path, f"{what} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise broken(path, f"{what} is no JSON object")
    return document


def _read(path: Path, max_bytes: int) -> bytes:
    size = regular_size(path)
    if size > max_bytes:
        text = f"it has {size_text(size)}, at most {size_text(max_bytes)} are taken"
        raise broken(path, text)
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror or error}") from error


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise broken(path, f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
