"""Access to the metadata keys of one architecture, with bounds and with errors that name the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.models.gguf.bounded_file import GgufArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.models.gguf.bounded_file import BoundedFile, Scalar

MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The keys `ARCHITECTURE.*` of a file."""

    file: BoundedFile
    architecture: str
    metadata: Mapping[str, Scalar | GgufArray]

    def key(self, name: str) -> str:
        """The full name of a key of this architecture."""
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Scalar | GgufArray | None:
        """The value as it stands in the file, None if the key is missing."""
        return self.metadata.get(self.key(name))

    def whole(self, name: str, low: int, high: int) -> int:
        """A required integer within bounds."""
        value = self.get(name)
        if value is None:
            raise self.file.broken(f"the required key {self.key(name)} is missing")
        return self._within(name, value, low, high)

    def optional(self, name: str, low: int, high: int) -> int | None:
        """An integer within bounds, if the key is there."""
        value = self.get(name)
        return None if value is None else self._within(name, value, low, high)

    def per_layer(self, name: str, block_count: int, high: int) -> list[int]:
        """One integer a layer (or one for all, in a list of one); empty if the key is missing."""
        value = self.get(name)
        if not isinstance(value, GgufArray):
            return [] if value is None else [self._within(name, value, 0, high)]
        if value.length != block_count or value.values is None:
            raise self.file.broken(f"{self.key(name)} has {value.length} values for {block_count} layers")
        return [self._within(name, each, 0, high) for each in value.values]

    def _within(self, name: str, value: Scalar | GgufArray, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.file.broken(f"{self.key(name)} is not an integer")
        if not low <= value <= high:
            raise self.file.broken(f"{self.key(name)} is {value}, {low} to {high} is possible")
        return value
