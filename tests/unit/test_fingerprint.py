"""What tells a model file from another in its place."""

import os
import shutil
from itertools import pairwise

import pytest

from stoker.errors import ModelFileError
from stoker.models.fingerprint import MAX_SAMPLED_BYTES, fingerprint

TIME_NS = 1_700_000_000_123_456_789


def _make(path, content, time_ns=TIME_NS):
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    return path


def test_the_same_file_has_the_same_fingerprint_wherever_it_lies(tmp_path):
    """SPEC C1: what was stored is found again after a restart, or a move."""
    one = _make(tmp_path / "one.gguf", b"weights" * 1000)
    other = tmp_path / "other.gguf"
    shutil.copy2(one, other)
    assert fingerprint(one) == fingerprint(one) == fingerprint(other)
    assert len(bytes.fromhex(fingerprint(one))) == 32


def test_size_time_and_content_each_change_it(tmp_path):
    """SPEC C1: a replaced file never serves stale state."""
    path = tmp_path / "model.gguf"
    found = {
        fingerprint(_make(path, b"a" * 5000)),
        fingerprint(_make(path, b"a" * 5001)),
        fingerprint(_make(path, b"b" * 5000)),
        fingerprint(_make(path, b"a" * 5000, TIME_NS + 1)),
    }
    assert len(found) == 4


@pytest.mark.parametrize("place", [0, 1, 200_000, -1])
def test_a_byte_changed_in_head_or_tail_of_a_large_file_changes_it(tmp_path, place):
    """SPEC C1: sampled content, even where size and time are the same."""
    content = bytearray(os.urandom(4 << 20))
    before = fingerprint(_make(tmp_path / "model.gguf", content))
    content[place] ^= 1
    assert fingerprint(_make(tmp_path / "model.gguf", content)) != before


def test_another_middle_of_a_large_file_changes_it(tmp_path):
    """SPEC C1: samples are taken all over the file."""
    content = bytearray(8 << 20)
    before = fingerprint(_make(tmp_path / "model.gguf", content))
    for start in range(1 << 20, 7 << 20, 1 << 20):
        other = bytearray(content)
        other[start : start + (1 << 20)] = os.urandom(1 << 20)
        assert fingerprint(_make(tmp_path / "model.gguf", other)) != before


def test_of_a_huge_file_only_samples_are_read(tmp_path, monkeypatch):
    """SPEC C1: a load does not read the model twice."""
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 34)
    read = []
    monkeypatch.setattr(
        "stoker.models.fingerprint._read", lambda file, start, length: read.append((start, length)) or b""
    )
    fingerprint(path)
    assert sum(length for _, length in read) <= MAX_SAMPLED_BYTES
    assert len(read) > 100
    assert read[0][0] == 0
    assert sum(read[-1]) == 1 << 34
    assert [start for start, _ in read] == sorted(start for start, _ in read)
    assert all(start + length <= after for (start, length), (after, _) in pairwise(read))


def test_every_shard_of_a_split_model_counts(tmp_path):
    """SPEC C1, R7: a model is all of its files."""
    shards = [tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for shard in shards:
        _make(shard, b"same content")
    before = fingerprint(shards[0])
    assert fingerprint(shards[2]) == before
    for shard in shards:
        _make(shard, b"other stuff!")
        assert fingerprint(shards[0]) != before
        _make(shard, b"same content")
    shards[1].unlink()
    assert fingerprint(shards[0]) != before


def test_what_cannot_be_read_is_named(tmp_path):
    """SPEC C1: a typed error with the path."""
    with pytest.raises(ModelFileError, match=r"gone\.gguf: cannot be read: No such file"):
        fingerprint(tmp_path / "gone.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        fingerprint(tmp_path / "pipe.gguf")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelFileError, match="Not a directory"):
        fingerprint(tmp_path / "file" / "model.gguf")
