"""Bodies of other APIs that are spelled as chat completions, and errors in the caller's own terms.

An error names a place of the chat completion; `OriginRules` translates it, in `param` and in the message, to
the field that the caller wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.errors import StokerError, error_from_info


class OriginRules:
    """The caller's own path for each path of the chat completion.

    Args:
        fields: paths that are always the same, such as `{"stop": "stop_sequences"}`.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._own = dict(fields)

    def __repr__(self) -> str:
        return f"Origins({len(self._own)} paths)"

    def add(self, path: str, own: str) -> None:
        """`path` of the chat completion was made of `own`; what is below the one is below the other."""
        self._own[path] = own

    def of(self, path: str) -> str:
        """The caller's path: by the longest known beginning; an unknown path is its own."""
        head, tail = path, ""
        while head:
            if head in self._own:
                return self._own[head] + tail
            head, _, name = head.rpartition(".")
            tail = f".{name}{tail}"
        return path

    def told(self, error: StokerError) -> StokerError:
        """The error with the caller's own path, in the message too where it names the path."""
        param = error.param
        if param is None or (own := self.of(param)) == param:
            return error
        message = error.message
        if "." in param or message.startswith(param):
            message = re.sub(rf"(?<![\w.]){re.escape(param)}(?!\w)", lambda _: own, message)
        return error_from_info(msgspec.structs.replace(error.info(), param=own, message=message))

    def add_text(self, path: str, own: str) -> None:
        """The message at `path` was made of a text, `own`."""
        self.add(path, own)
        self.add(f"{path}.content", own)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the block name the caller's own places.

        Raises:
            StokerError: as the block raised it, translated.
        """
        try:
            yield
        except StokerError as error:
            raise self.told(error) from error


@dataclass(frozen=True)
class Translation:
    """The body of a chat completion as JSON values, and where its places stand in the body it was made of."""

    body: dict[str, Any]
    origins: OriginRules
