"""What llama.cpp says where memory is short, as an error with numbers (SPEC R12).

Owns the reading of its log. The native text goes into the error's details, never alone to a person.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stoker.backends.llama.binding import error_text
from stoker.errors import InsufficientMemoryError, ModelLoadError
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker.backends.device import Device
    from stoker.backends.llama.binding import LogLine
    from stoker.errors import StokerError

_OF_BUFFER = re.compile(r"failed to allocate (\S+) buffer of size (\d+)")
_OF_CARD = re.compile(r"allocating ([\d.]+) MiB on device (\d+): \w+ failed")
_OF_HOST = re.compile(r"failed to allocate buffer of size (\d+)|attempted to allocate +([\d.]+) MB")
_UNTOLD = re.compile(r"(failed|unable) to allocate|bad_alloc|out of (device )?memory", re.IGNORECASE)
_HOST = "the machine's memory"


def load_error(what: str, lines: Sequence[LogLine], devices: Sequence[Device], **details: Any) -> StokerError:
    """Why the library did not make something.

    Args:
        what: was to be made, for people: "a context of 4096 cells for m.gguf".
        lines: what it logged meanwhile.
        devices: those it may have asked for memory.
        details: of a `ModelLoadError`.

    Returns:
        InsufficientMemoryError where memory was short, else ModelLoadError with what the library said.
    """
    found = _found(line.text for line in lines if line.is_error)
    if found is None:
        return ModelLoadError(f"llama.cpp refused {what}: {error_text(list(lines))}", **details)
    name, needed = found
    device = next((each for each in devices if name in {each.id, str(each.index)}), None)
    memory = device.memory() if device is not None else None
    of = device.id if device is not None else _HOST
    told = f" of {size_text(needed)}" if needed else ""
    free = f", of which {size_text(memory.free_bytes)} are free" if memory is not None else ""
    where: dict[str, Any] = {"device": device.id} if device is not None else {}
    return InsufficientMemoryError(
        f"there is too little memory for {what}: a part{told} was refused by {of}{free}",
        needed=needed,
        free=memory.free_bytes if memory is not None else 0,
        native=error_text(list(lines)),
        **where,
    )


def _found(texts: Iterable[str]) -> tuple[str, int] | None:
    """Name or index of what was asked for memory ("": not told), and bytes; None: memory was not short."""
    is_short, found = False, ("", 0)
    for text in texts:
        if match := _OF_BUFFER.search(text):
            return match[1], int(match[2])
        if match := _OF_CARD.search(text):
            found = match[2], int(float(match[1]) * 2**20)
        elif match := _OF_HOST.search(text):
            found = "", int(match[1] or float(match[2]) * 10**6)
        is_short |= _UNTOLD.search(text) is not None
    return found if is_short or found[1] else None
