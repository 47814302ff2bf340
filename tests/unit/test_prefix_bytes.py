"""A stored prefix as bytes that travel without a file: layout and checks are the disk tier's (SPEC C9)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from stoker.cache.disk.files import PrefixFolder
from stoker.cache.disk.prefix_file import DamagedError, NewPrefix, decode, decode_head, encode
from stoker.cache.radix import key_of

NEW = NewPrefix(bytes(range(32)), "f1e2d3", "/models/one.gguf", key_of(range(100, 140)), is_exact=True)
PAYLOAD = Random(0).randbytes(5000)


def test_bytes_are_those_of_the_file_and_come_back_without_a_copy(tmp_path: Path) -> None:
    """C9: what one machine wrote as a file another reads as bytes."""
    folder = PrefixFolder(tmp_path, 1 << 20)
    folder.open()
    written = folder.write(NEW, PAYLOAD).file
    data = encode(NEW, memoryview(PAYLOAD))
    assert (tmp_path / written.name).read_bytes() == data
    new, payload = decode(data)
    assert new == NEW
    assert payload == PAYLOAD
    assert payload.obj is data


def test_the_head_alone_says_what_it_is_for() -> None:
    """A listing reads no states."""
    data = encode(replace(NEW, is_background=True), memoryview(PAYLOAD))
    start = len(data) - len(PAYLOAD)
    assert decode_head(memoryview(data)[:start], len(data))[0] == replace(NEW, is_background=True)
    with pytest.raises(DamagedError, match=f"ends after {start - 1} of {start} bytes"):
        decode_head(memoryview(data)[: start - 1], len(data))


def test_bytes_cut_or_changed_anywhere_are_refused() -> None:
    """C9: nothing is believed that is not what was written."""
    data = encode(NEW, memoryview(PAYLOAD))
    random = Random(1)
    for length in (0, 1, *(random.randrange(len(data)) for _ in range(50)), len(data) - 1):
        with pytest.raises(DamagedError):
            decode(data[:length])
    for at in (*range(120), *(random.randrange(len(data)) for _ in range(100))):
        changed = bytearray(data)
        changed[at] ^= 1 << random.randrange(8)
        with pytest.raises(DamagedError):
            decode(changed)
