"""The parts of one turn's content as one text.

Each text stands on a line of its own, as with vLLM and llama-server: clients cut a content where a line ends,
and glued together two sentences would share a word. Nothing is put beside a picture's marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(content: Any) -> str:
    """The text of a content: of a list that of its parts, nothing of what is no text."""
    if isinstance(content, list | tuple):
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
