"""Reads the little-endian values a GGUF header is made of, never past the end of the file.

Every length is compared with the bytes that are left before anything is read or allocated.
`stoker.models.gguf.header` says what the values mean.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Self

from stoker.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

Scalar = bool | int | float | str

MAX_KEY_BYTES = 65_535  # the GGUF specification's bound on a key
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_LENGTH = 4 << 20
MAX_VALUES_KEPT = 1024
_WINDOW_BYTES = 1 << 20

STRING_TYPE = 8
ARRAY_TYPE = 9
_BOOL_TYPE = 7
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
TYPE_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: "string",
    9: "array",
    10: "uint64",
    11: "int64",
    12: "float64",
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata.

    Attributes:
        element_type: name of the GGUF type of its elements.
        length: number of elements.
        offset: bytes from the start of the file to the first element.
        values: the elements if there are at most `MAX_VALUES_KEPT`, else None (read them on demand).
    """

    element_type: str
    length: int
    offset: int
    values: tuple[Scalar, ...] | None


class BoundedFile:
    """A regular file read forward, value by value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        try:
            mode = path.stat()
            if not stat.S_ISREG(mode.st_mode):
                raise self.broken("it is not a regular file")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ModelFileError(
                f"{path}: cannot be read: {error.strerror or error}", path=str(path)
            ) from error
        self.size = mode.st_size
        self._walked: dict[tuple[int, int], tuple[int, list[bytes]]] = {}  # strings by begin and number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return f"BoundedFile({str(self.path)!r}, {self.position} of {self.size} bytes)"

    def broken(self, reason: str) -> ModelFileError:
        """The error that says what is wrong with this file."""
        return ModelFileError(f"{self.path}: {reason}", path=str(self.path))

    def read(self, num_bytes: int, what: str) -> bytes:
        """The next bytes. Raises ModelFileError when there are not so many."""
        left = self.size - self.position
        if num_bytes > left:
            raise self.broken(
                f"truncated: {what} needs {num_bytes} bytes at {self.position}, {left} are left"
            )
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.broken(f"shrank while it was read: {what}")
        self.position += num_bytes
        return data

    def seek(self, position: int) -> None:
        """Go to a byte of the file."""
        if not 0 <= position <= self.size:
            raise self.broken(f"byte {position} is outside its {self.size} bytes")
        self._file.seek(position)
        self.position = position

    def number(self, letter: str, what: str) -> int:
        """An integer of the `struct` format `letter`."""
        (value,) = struct.unpack("<" + letter, self.read(struct.calcsize("<" + letter), what))
        return int(value)

    def text(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        """A length-prefixed UTF-8 string of at most `max_bytes`."""
        length = self.number("Q", f"the length of {what}")
        if length > max_bytes:
            raise self.broken(f"{what} claims {length} bytes, at most {max_bytes} are taken")
        try:
            return self.read(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8 ({error.reason} at byte {error.start})") from None

    def scalar(self, gguf_type: int, what: str) -> Scalar:
        """One value of a GGUF type other than array."""
        if gguf_type == STRING_TYPE:
            return self.text(what)
        letter = _FORMATS.get(gguf_type)
        if letter is None:
            raise self.broken(f"{what} has the unknown value type {gguf_type}")
        (value,) = struct.unpack("<" + letter, self.read(struct.calcsize("<" + letter), what))
        if gguf_type == _BOOL_TYPE:
            return self._bool(value, what)
        return float(value) if letter in "fd" else int(value)

    def array(self, what: str) -> GgufArray:
        """An array's type, length and place; its values only when they are few. Ends behind the last one."""
        gguf_type = self.number("I", f"the element type of {what}")
        length = self.number("Q", f"the length of {what}")
        if gguf_type == ARRAY_TYPE:
            raise self.broken(f"{what} is an array of arrays, which no reader takes")
        if gguf_type not in TYPE_NAMES:
            raise self.broken(f"{what} has the unknown element type {gguf_type}")
        self._check_length(gguf_type, length, what)
        offset, values = self.position, None
        if length <= MAX_VALUES_KEPT:
            values = tuple(self.scalar(gguf_type, what) for _ in range(length))
        elif gguf_type == STRING_TYPE:
            self.strings(length, what)
        else:
            self.seek(self.position + length * struct.calcsize("<" + _FORMATS[gguf_type]))
        return GgufArray(TYPE_NAMES[gguf_type], length, offset, values)

    def strings(self, length: int, what: str) -> list[bytes]:
        """The next `length` length-prefixed strings as bytes, checked to be UTF-8.

        Many are remembered: a vocabulary is walked over, as what follows it is, and then looked at.
        """
        place = self.position, length
        if place in self._walked:
            end, found = self._walked[place]
            self.seek(end)
            return found
        found = self._read_strings(length, what)
        try:
            b"\0".join(found).decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} holds a string that is not UTF-8 ({error.reason})") from None
        if len(found) > MAX_VALUES_KEPT:
            self._walked[place] = self.position, found
        return found

    def _read_strings(self, length: int, what: str) -> list[bytes]:
        found: list[bytes] = []
        append, unpack, head = found.append, _LENGTH.unpack_from, _LENGTH.size
        window, start, have = b"", 0, 0
        for _ in range(length):  # a quarter of a million times for a large vocabulary
            first = start + head
            if first > have:
                window, start = self._refill(window, start, head, what), 0
                first, have = head, len(window)
            end = first + unpack(window, start)[0]
            if end > have:
                self._check_string(end - first, what)
                window, start = self._refill(window, start, end - start, what), 0
                first, end, have = head, head + end - first, len(window)
            append(window[first:end])
            start = end
        self.seek(self.position - (have - start))
        return found

    def _check_string(self, size: int, what: str) -> None:
        """Of one that is not in memory yet; what is there is shorter than any bound."""
        if size > MAX_STRING_BYTES:
            text = f"a string of {what} claims {size} bytes, at most {MAX_STRING_BYTES} are taken"
            raise self.broken(text)

    def _refill(self, window: bytes, start: int, num_bytes: int, what: str) -> bytes:
        rest = window[start:]
        wanted = num_bytes - len(rest)
        ahead = min(max(wanted, _WINDOW_BYTES), self.size - self.position)
        return rest + self.read(max(ahead, wanted), what)

    def _check_length(self, gguf_type: int, length: int, what: str) -> None:
        if length > MAX_ARRAY_LENGTH:
            raise self.broken(f"{what} claims {length} elements, at most {MAX_ARRAY_LENGTH} are taken")
        smallest = _LENGTH.size if gguf_type == STRING_TYPE else struct.calcsize("<" + _FORMATS[gguf_type])
        left = self.size - self.position
        if length * smallest > left:
            raise self.broken(
                f"truncated: {what} claims {length} elements of at least {smallest} bytes, {left} are left"
            )

    def _bool(self, value: int, what: str) -> bool:
        if value not in {0, 1}:
            raise self.broken(f"{what} is a bool with the value {value}")
        return bool(value)
