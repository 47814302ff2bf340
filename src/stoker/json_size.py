"""How long the JSON of a value would be at least, without making it.

An encoder holds the interpreter's lock, and with it every other thread, until it is done: for 32 MiB up to a
fifth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def num_chars(value: Any) -> int:
    """Characters of all strings in a JSON value, keys included. Recursive, as an encoder is."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(num_chars(name) + num_chars(inner) for name, inner in value.items())
        case list() | tuple():
            return sum(map(num_chars, value))
    return 0
