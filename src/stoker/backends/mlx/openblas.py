"""Puts OpenBLAS in the place of the reference BLAS that MLX's wheel for Linux CPUs brings.

That one multiplies at a thirtieth of the speed. The wheel `scipy-openblas32` has the same functions, with a
prefix before their names, so the dynamic linker does not find them by itself: the three entries of MLX's
table of imported functions are set to them here, each before or after its first call. Nothing is written to
disk. Where anything is not as it is known, all stays as it was.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_PREFIX = "scipy_"
_PACKAGE = "scipy_openblas32"
_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL = 2, 5, 6, 23
_RELOCATION = struct.Struct("<QQq")
_ENTRY = struct.Struct("<QQ")
_SYMBOL_BYTES = 24
_MAPS = Path("/proc/self/maps")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenBlas:
    """The library that took the place.

    Attributes:
        library: loaded.
        name: for people, such as "OpenBLAS 0.3.31".
    """

    library: ctypes.CDLL
    name: str

    def set_threads(self, num_threads: int) -> None:
        """Multiply with so many threads from now on."""
        self.library[f"{_PREFIX}openblas_set_num_threads"](ctypes.c_int(num_threads))


def take_place() -> OpenBlas | None:
    """Have MLX, which is loaded, multiply with OpenBLAS; None: there is none here, or MLX is another one."""
    if sys.platform != "linux" or struct.calcsize("P") != struct.calcsize("Q"):
        return None
    try:
        found = _open()
        slots = dict(_slots()) if found else {}
        if found is None or not slots:
            return None
        for name, slot in slots.items():
            function = ctypes.cast(found.library[_PREFIX + name], ctypes.c_void_p)
            ctypes.c_void_p.from_address(slot).value = function.value
    except (OSError, AttributeError, struct.error) as error:
        log.warning("OpenBLAS is not used: %s", error)
        return None
    return found


def _open() -> OpenBlas | None:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = next(Path(spec.submodule_search_locations[0]).glob("lib/libscipy_openblas*.so"), None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    config = library[f"{_PREFIX}openblas_get_config"]
    config.restype = ctypes.c_char_p
    words = config().decode(errors="replace").split()
    return OpenBlas(library, " ".join(words[:2]))


def _slots() -> Iterator[tuple[str, int]]:
    """Names of `FUNCTIONS` and where MLX has their addresses, where it may be written."""
    base, writable = _mapping()
    if base is None:
        return
    dynamic = _dynamic(base)
    at, count = dynamic[_DT_JMPREL], dynamic[_DT_PLTRELSZ] // _RELOCATION.size
    for offset, info, _ in _RELOCATION.iter_unpack(ctypes.string_at(at, count * _RELOCATION.size)):
        symbol = dynamic[_DT_SYMTAB] + (info >> 32) * _SYMBOL_BYTES
        (name_at,) = struct.unpack("<I", ctypes.string_at(symbol, 4))
        name = ctypes.string_at(dynamic[_DT_STRTAB] + name_at).decode(errors="replace")
        if name in FUNCTIONS and any(base + offset in span for span in writable):
            yield name, base + offset


def _mapping() -> tuple[int | None, list[range]]:
    """Where MLX's library begins in memory, and its parts that may be written."""
    base, writable = None, []
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name == "libmlx.so":  # noqa: PLR2004 - proc_pid_maps(5)
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            base = begin if base is None else min(base, begin)
            writable += [range(begin, end)] if "w" in fields[1] else []
    return base, writable


def _dynamic(base: int) -> dict[int, int]:
    """The table that the dynamic linker reads, by tag; addresses as they are in memory (elf(5))."""
    header = ctypes.string_at(base, 64)
    (at,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    for number in range(count):
        kind, _, _, address = struct.unpack("<IIQQ", ctypes.string_at(base + at + number * size, 24))
        if kind == _PT_DYNAMIC:
            break
    else:
        raise OSError("the library of MLX has no dynamic section")
    found: dict[int, int] = {}
    place = base + address
    while True:
        tag, value = _ENTRY.unpack(ctypes.string_at(place, _ENTRY.size))
        if tag == 0:
            return found
        is_address = tag in {_DT_STRTAB, _DT_SYMTAB, _DT_JMPREL}
        found[tag] = base + value if is_address and value < base else value
        place += _ENTRY.size
