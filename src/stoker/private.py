"""Folders and files with prompts, answers and keys that only their owner can read; no core files of them."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each for its owner alone; one that is there stays.

    `Path.mkdir` gives its mode to the last folder only.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder == folder.parent:
            break
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(mode=FOLDER_MODE, exist_ok=True)


def write_text(file: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Put a file in place in one move, readable by its owner alone; its folder is made if it is missing.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    make_folder(file.parent)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def forbid_core_files() -> None:
    """A crash of this process and of its children leaves no file with its memory."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not on every system

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
