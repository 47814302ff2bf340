"""A model is the same where only the times of its files differ, and another where one byte does (C20)."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from stoker.errors import ModelFileError
from stoker.models import contents
from stoker.models.contents import CONTENTS_FILE, content_digest
from stoker.models.fingerprint import MAX_SAMPLED_BYTES, fingerprint

BYTES = Random(0).randbytes(3 * MAX_SAMPLED_BYTES)


def model(folder: Path, data: bytes = BYTES, name: str = "a.gguf") -> Path:
    """A file."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data)
    return path


def test_a_copy_with_another_time_and_name_is_the_same(tmp_path: Path) -> None:
    """C20: where the fingerprint, which has the time in it, differs."""
    one, other = model(tmp_path / "one"), model(tmp_path / "other", name="b.gguf")
    os.utime(other, (1, 1))
    assert fingerprint(one) != fingerprint(other)
    assert content_digest(one, tmp_path / "c1") == content_digest(other, tmp_path / "c2")


def test_every_byte_counts(tmp_path: Path) -> None:
    """C20: also one that no sample of the fingerprint has."""
    digests = {content_digest(model(tmp_path / "whole"), tmp_path / "c")}
    for at in (0, len(BYTES) // 2 + 1, len(BYTES) - 1):
        changed = bytearray(BYTES)
        changed[at] ^= 1
        digests.add(content_digest(model(tmp_path / str(at), bytes(changed)), tmp_path / "c"))
    assert len(digests) == 4


def test_every_shard_and_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    """C20: a model is all its files."""
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "c"
    for folder, last in ((one, b"2"), (two, b"3")):
        model(folder, b"1", names[0])
        model(folder, last, names[1])
    assert content_digest(one / names[0], cache) != content_digest(two / names[0], cache)
    assert content_digest(one, cache) != content_digest(two, cache)


def test_it_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C20: the digest is remembered until the file changes."""
    path, cache = model(tmp_path / "one"), tmp_path / "c"
    reads: list[int] = []
    first = content_digest(path, cache, lambda: reads.append(1))
    assert content_digest(path, cache, lambda: reads.append(1)) == first
    assert len(reads) == 1
    (cache / CONTENTS_FILE).write_text("damaged")
    assert content_digest(path, cache, lambda: reads.append(1)) == first
    assert len(reads) == 2
    os.utime(path, (1, 1))
    monkeypatch.setattr(contents, "_PIECE_BYTES", MAX_SAMPLED_BYTES)
    assert content_digest(path, cache, lambda: reads.append(1)) == first
    assert len(reads) == 5


def test_a_file_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    """C20: as any other model that is not there."""
    with pytest.raises(ModelFileError):
        content_digest(tmp_path / "none.gguf", tmp_path)
