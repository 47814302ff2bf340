"""Prefix files on disk: what is written is read back as it was, and nothing else is believed."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import zlib
from dataclasses import replace
from random import Random

import pytest

from stoker.cache.disk import files as disk
from stoker.cache.disk import prefix_file
from stoker.cache.disk.files import ABANDONED_S, PrefixFolder
from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.radix import key_of
from stoker.errors import CacheFileError, MachineSetupError

SPACE = bytes(range(32))
TOKENS = key_of(range(100, 140))
NEW = NewPrefix(SPACE, "f1e2d3", "/models/one.gguf", TOKENS)
PAYLOAD = Random(0).randbytes(5000)
LIMIT = 1 << 20
FIELDS = (
    *("magic", "mark", "version", "flags", "size", "space"),
    *("model_size", "source_size", "count", "payload", "sha", "crc"),
)
WRITER = """
import os, sys
from pathlib import Path
from stoker.cache.disk.files import PrefixFolder
from stoker.cache.disk.prefix_file import NewPrefix
from stoker.errors import CacheFileError
folder = PrefixFolder(Path(sys.argv[1]), int(sys.argv[2]))
new = NewPrefix(bytes(32), "model", "/model", bytes(160))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder made ready."""
    made = PrefixFolder(tmp_path / "prefixes", LIMIT)
    assert made.open() == []
    return made


def _start(folder, code):
    return subprocess.Popen([sys.executable, "-c", code, str(folder.folder), str(folder.limit_bytes)])


def _path(folder, name):
    return folder.folder / name


def _names(folder):
    return sorted(path.name for path in folder.folder.iterdir())


def _age(path, seconds):
    told = path.lstat()
    os.utime(path, (told.st_mtime - seconds,) * 2, follow_symlinks=False)


def _refused_and_removed(folder, name):
    """Neither listed nor read; afterwards it is gone."""
    content = _path(folder, name).read_bytes()
    with pytest.raises(CacheFileError, match="removed"):
        folder.read(name, SPACE, TOKENS)
    assert _names(folder) == []
    _path(folder, name).write_bytes(content)
    (verdict,) = folder.verify()
    assert verdict.problem
    assert _names(folder) == [name]


def _forge(folder, name, **changes):
    """Give fields of the fixed head other values, and the head a checksum that fits."""
    raw = _path(folder, name).read_bytes()
    head = dict(zip(FIELDS, prefix_file._HEAD.unpack(raw[: prefix_file._HEAD.size]), strict=True))
    end = len(raw) - head["payload"]
    head |= changes | {"crc": 0}
    rest = raw[prefix_file._HEAD.size : end]
    head["crc"] = zlib.crc32(rest, zlib.crc32(prefix_file._HEAD.pack(*head.values())))
    _path(folder, name).write_bytes(prefix_file._HEAD.pack(*head.values()) + raw[prefix_file._HEAD.size :])


def test_what_is_written_is_read_back_after_a_restart(folder):
    """SPEC C9: tokens, namespace, class and state survive."""
    written = folder.write(replace(NEW, is_background=True), memoryview(PAYLOAD))
    assert written.removed == ()
    again = PrefixFolder(folder.folder, LIMIT)
    (found,) = again.open()
    assert found == written.file
    assert (found.namespace, found.model, found.source) == (SPACE, NEW.model, NEW.source)
    assert (found.tokens, found.num_tokens, found.is_background) == (TOKENS, 40, True)
    assert found.size_bytes == _path(folder, found.name).stat().st_size == again.total_bytes()
    assert found.payload_bytes == len(PAYLOAD)
    assert again.read(found.name, SPACE, TOKENS) == PAYLOAD
    assert [verdict.problem for verdict in again.verify()] == [""]


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
def test_what_kind_of_entry_it_was_survives(folder, is_background, is_exact):
    """SPEC C2, C9: a state that cannot go back is known as one after a restart."""
    folder.write(replace(NEW, is_background=is_background, is_exact=is_exact), PAYLOAD)
    (found,) = folder.open()
    assert (found.is_background, found.is_exact) == (is_background, is_exact)


def test_a_state_of_no_bytes_and_a_name_that_is_not_utf8_are_kept(folder):
    """SPEC C9: whatever there is to write."""
    new = replace(NEW, source=os.fsdecode(b"/models/\xff.gguf"))
    made = folder.write(new, bytearray()).file
    assert folder.open()[0].source == new.source
    assert folder.read(made.name, SPACE, TOKENS) == b""


def test_only_the_owner_may_read(tmp_path):
    """SPEC C9: mode 0600 in a folder of mode 0700, whatever was there before."""
    place = tmp_path / "prefixes"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    folder = PrefixFolder(place, LIMIT)
    folder.open()
    name = folder.write(NEW, PAYLOAD).file.name
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(_path(folder, name).stat().st_mode) == 0o600


def test_names_are_the_servers_own(folder):
    """SPEC C9: no part of a name comes from a request, and none leads out of the folder."""
    names = {folder.write(NEW, PAYLOAD).file.name for _ in range(3)}
    assert len(names) == 3
    outside = folder.folder.parent / "outside.prefix"
    outside.write_bytes(b"mine")
    for name in ("../outside.prefix", str(outside), "x", "", "..", "a\0.prefix"):
        with pytest.raises(CacheFileError, match="no name"):
            folder.read(name, SPACE, TOKENS)
        with pytest.raises(CacheFileError, match="no name"):
            folder.remove(name)
    assert outside.read_bytes() == b"mine"


def test_a_file_cut_anywhere_is_refused_and_removed(folder):
    """SPEC C9: a short file is never trusted."""
    name = folder.write(NEW, PAYLOAD).file.name
    whole = _path(folder, name).read_bytes()
    head, end = prefix_file._HEAD.size, len(whole) - len(PAYLOAD)
    for length in (0, 1, 8, 20, head - 1, head, head + 3, end - 1, end, end + 1, len(whole) - 1):
        _path(folder, name).write_bytes(whole[:length])
        _refused_and_removed(folder, name)
        assert folder.open() == []
        assert _names(folder) == []
    _path(folder, name).write_bytes(whole + b"\0")
    _refused_and_removed(folder, name)


def test_a_flipped_bit_anywhere_is_refused_and_removed(folder):
    """SPEC C9: two checksums leave no byte out."""
    name = folder.write(NEW, PAYLOAD).file.name
    whole = _path(folder, name).read_bytes()
    end = len(whole) - len(PAYLOAD)
    random = Random(1)
    for place in [*range(end * 8), *random.sample(range(end * 8, len(whole) * 8), 300)]:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        _path(folder, name).write_bytes(flipped)
        with pytest.raises(CacheFileError, match="removed"):
            folder.read(name, SPACE, TOKENS)
        assert not _path(folder, name).exists()
    flipped = bytearray(whole)
    flipped[end - 1] ^= 1
    _path(folder, name).write_bytes(flipped)
    assert folder.open() == []
    assert _names(folder) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"GGUFGGUF"}, "no prefix file"),
        ({"version": 2}, "version 2, this is 1"),
        ({"mark": (0x01020304).to_bytes(4, "little" if sys.byteorder == "big" else "big")}, "byte order"),
        ({"count": 0}, "lengths"),
        ({"count": (1 << 32) - 1}, "lengths"),
        ({"count": 41}, "its head tells of"),
        ({"payload": (1 << 64) - 1}, "its head tells of"),
        ({"payload": 1 << 40}, "its head tells of"),
        ({"size": (1 << 32) - 1}, "lengths"),
        ({"model_size": 65535}, "lengths"),
        ({"sha": bytes(32)}, "its state has another checksum"),
    ],
)
def test_a_foreign_head_is_refused_and_removed(folder, changes, reason):
    """SPEC C9: other version, other byte order, lengths that cannot be; all with a checksum that fits."""
    name = folder.write(NEW, PAYLOAD).file.name
    _forge(folder, name, **changes)
    (verdict,) = folder.verify()
    assert reason in verdict.problem
    _refused_and_removed(folder, name)


def test_a_huge_declared_length_allocates_nothing(folder, monkeypatch):
    """SPEC C9: no length is believed before it fits the size of the file."""
    name = folder.write(NEW, PAYLOAD).file.name
    _forge(folder, name, count=1 << 24, payload=1 << 50)
    asked = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: asked.append(count) or pread(fd, count, at))
    assert folder.open() == []
    assert asked == [prefix_file._HEAD.size]


def test_a_sparse_file_beyond_the_limit_is_not_read(folder):
    """SPEC C9: a file as large as it says is held against the bound as well."""
    name = folder.write(NEW, PAYLOAD).file.name
    size = _path(folder, name).stat().st_size
    _forge(folder, name, payload=len(PAYLOAD) + (1 << 42))
    os.truncate(_path(folder, name), size + (1 << 42))
    with pytest.raises(CacheFileError, match="all may take 1048576; removed"):
        folder.read(name, SPACE, TOKENS)
    assert _names(folder) == []


def test_a_file_that_holds_something_else_is_not_used(folder):
    """SPEC C1, C9: a prefix of one namespace is never used in another."""
    for space, tokens in ((bytes(32), TOKENS), (SPACE, TOKENS[:-4]), (SPACE, TOKENS + TOKENS)):
        name = folder.write(NEW, PAYLOAD).file.name
        with pytest.raises(CacheFileError, match="another prefix"):
            folder.read(name, space, tokens)
        assert _names(folder) == []


def test_a_link_is_removed_and_what_it_leads_to_is_not_touched(folder, tmp_path):
    """SPEC C9: neither followed to read nor to write nor to remove."""
    outside = tmp_path / "outside"
    name = folder.write(NEW, PAYLOAD).file.name
    _path(folder, name).rename(outside)
    before = outside.stat()
    _path(folder, name).symlink_to(outside)
    assert [verdict.problem for verdict in folder.verify()] == ["it is no regular file"]
    with pytest.raises(CacheFileError, match="no regular file; removed"):
        folder.read(name, SPACE, TOKENS)
    for target in (outside, tmp_path / "nowhere", tmp_path):
        _path(folder, name).symlink_to(target)
        assert folder.open() == []
        assert _names(folder) == []
    assert outside.stat().st_mtime_ns == before.st_mtime_ns
    assert outside.stat().st_size == before.st_size


def test_a_pipe_in_the_folder_is_not_waited_for(folder):
    """SPEC C9: what is no regular file is not ours."""
    os.mkfifo(_path(folder, "pipe.prefix"))
    assert folder.open() == []
    assert _names(folder) == []


def test_what_is_not_ours_is_left_alone(folder):
    """SPEC C9: only files with our suffixes are."""
    _path(folder, "notes.txt").write_text("mine")
    _path(folder, "a.prefix").mkdir()
    assert folder.open() == []
    assert folder.clear() == []
    assert _names(folder) == ["a.prefix", "notes.txt"]


def test_files_of_a_replaced_model_go_and_those_of_another_stay(folder):
    """SPEC C1, C9: a stale file is removed."""
    stale = folder.write(NEW, PAYLOAD).file.name
    fresh = folder.write(replace(NEW, model="new"), PAYLOAD).file.name
    other = folder.write(replace(NEW, source="/models/two.gguf"), PAYLOAD).file.name
    assert folder.remove_stale(NEW.source, "new") == [stale]
    assert _names(folder) == sorted([fresh, other])
    left = folder.open(stale=lambda file: file.source == "/models/two.gguf")
    assert [file.name for file in left] == [fresh]
    assert _names(folder) == [fresh]


def test_a_file_that_another_server_removed_is_a_miss(folder):
    """SPEC C9: two servers on one folder."""
    name = folder.write(NEW, PAYLOAD).file.name
    PrefixFolder(folder.folder, LIMIT).remove(name)
    with pytest.raises(CacheFileError, match="somebody else removed it") as caught:
        folder.read(name, SPACE, TOKENS)
    assert caught.value.details["is_gone"]
    folder.remove(name)
    assert list(folder.verify()) == []


def test_the_longest_unused_goes_to_make_room(folder):
    """SPEC C7, C9: the bound holds with the new file in it; a read counts as a use."""
    first, second, third = (folder.write(NEW, PAYLOAD).file for _ in range(3))
    for age, file in ((30, first), (20, second), (10, third)):
        _age(_path(folder, file.name), age)
    folder.read(first.name, SPACE, TOKENS)
    folder.limit_bytes = folder.total_bytes()
    assert [file.name for file in folder.files()] == [second.name, third.name, first.name]
    assert folder.write(NEW, PAYLOAD).removed == (second.name,)
    assert folder.total_bytes() == folder.limit_bytes
    assert len(folder.write(NEW, PAYLOAD[:1]).removed) == 1


def test_what_was_overlooked_while_it_got_its_name_goes_afterwards(folder, monkeypatch):
    """SPEC C9: another server's file that was renamed during the look round is found by the next."""
    other = folder.write(NEW, PAYLOAD).file
    _age(_path(folder, other.name), 10)
    folder.limit_bytes = other.size_bytes
    look, looks = PrefixFolder._entries, []

    def overlook(self):
        looks.append(self)
        found = look(self)
        return [each for each in found if each.name != other.name] if len(looks) <= 3 else found

    monkeypatch.setattr(PrefixFolder, "_entries", overlook)
    made = folder.write(NEW, PAYLOAD)
    assert made.removed == (other.name,)
    assert _names(folder) == [made.file.name]


def test_a_lower_limit_holds_from_the_start(folder):
    """SPEC C9: what is over the bound goes when the folder is opened."""
    old, young = (folder.write(NEW, PAYLOAD).file for _ in range(2))
    _age(_path(folder, old.name), 10)
    again = PrefixFolder(folder.folder, young.size_bytes)
    assert [file.name for file in again.open()] == [young.name]
    assert again.total_bytes() == young.size_bytes


def test_a_prefix_larger_than_the_limit_is_refused(folder):
    """SPEC C9: nothing is removed for what can never fit."""
    kept = folder.write(NEW, PAYLOAD).file.name
    with pytest.raises(CacheFileError, match="does not fit the disk tier of 1048576"):
        folder.write(NEW, bytes(LIMIT))
    assert _names(folder) == [kept]


def test_a_folder_that_cannot_be_one_is_said_to_be(tmp_path):
    """SPEC C9: unwritable folder: a typed error that names it."""
    place = tmp_path / "file"
    place.write_bytes(b"")
    folders = [PrefixFolder(place, LIMIT), PrefixFolder(place / "below", LIMIT)]
    for folder in folders:
        with pytest.raises(MachineSetupError, match=str(place)):
            folder.open()
        with pytest.raises(MachineSetupError, match=str(place)):
            folder.write(NEW, PAYLOAD)
        with pytest.raises(MachineSetupError, match=str(place)):
            folder.files()


def _failing(call, number):
    def fail(*arguments, **options):
        if call is os.open and not arguments[1] & os.O_CREAT:
            return call(*arguments, **options)
        raise OSError(number, os.strerror(number))

    return fail


def test_a_read_only_folder_is_found_out_when_it_is_opened(folder, monkeypatch):
    """SPEC C9: before anything is promised to be kept there."""
    monkeypatch.setattr(os, "open", _failing(os.open, errno.EROFS))
    with pytest.raises(MachineSetupError, match="cannot be used: Read-only file system"):
        folder.open()


@pytest.mark.parametrize("call", ["open", "ftruncate", "write", "fsync"])
def test_a_full_disk_is_said_and_leaves_nothing_half_written(folder, monkeypatch, call):
    """SPEC C9: a full disk loses nothing else."""
    kept = folder.write(NEW, PAYLOAD).file
    with monkeypatch.context() as broken:
        broken.setattr(os, call, _failing(getattr(os, call), errno.ENOSPC))
        with pytest.raises(MachineSetupError, match="cannot be written: No space left on device"):
            folder.write(NEW, PAYLOAD)
    assert _names(folder) == [kept.name]
    assert folder.read(kept.name, SPACE, TOKENS) == PAYLOAD
    assert folder.write(NEW, PAYLOAD).file.name in _names(folder)


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_half_written(folder, monkeypatch):
    """SPEC C9: nor does a write that does some."""
    write, calls = os.write, []

    def fill(fd, data):
        calls.append(len(data))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(MachineSetupError, match="No space left"):
        folder.write(NEW, PAYLOAD)
    assert _names(folder) == []


def test_short_writes_are_carried_on(folder, monkeypatch):
    """SPEC C9: the system may take fewer bytes than it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:777]))
    name = folder.write(NEW, PAYLOAD).file.name
    assert folder.read(name, SPACE, TOKENS) == PAYLOAD


def test_a_writer_killed_before_the_end_leaves_no_entry(folder):
    """SPEC C9: writes are atomic; what a dead writer left goes after a while."""
    code = WRITER + "os.fsync = lambda fd: os._exit(7); folder.write(new, bytes(5000))"
    assert _start(folder, code).wait(60) == 7
    (left,) = _names(folder)
    assert left.endswith(".part")
    assert folder.open() == []
    assert folder.files() == []
    assert folder.total_bytes() == 0
    assert _names(folder) == [left]
    _age(_path(folder, left), ABANDONED_S + 1)
    folder.open()
    assert _names(folder) == []


def test_an_unfinished_file_of_a_living_writer_stays_however_old(folder):
    """SPEC C9: two servers on one folder."""
    part = _path(folder, "0.part")
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _age(part, 10_000)
        folder.open()
        folder.write(NEW, PAYLOAD)
        assert "0.part" in _names(folder)
    folder.write(NEW, PAYLOAD)
    assert "0.part" not in _names(folder)


def test_what_another_server_is_writing_counts(folder):
    """SPEC C9: two servers that write at once stay within the bound together."""
    kept = folder.write(NEW, PAYLOAD).file
    part = _path(folder, "0.part")
    part.touch()
    os.truncate(part, LIMIT - kept.size_bytes)
    assert folder.write(NEW, PAYLOAD).removed == (kept.name,)
    os.truncate(part, LIMIT)
    with pytest.raises(CacheFileError, match="being written"):
        folder.write(NEW, PAYLOAD)
    assert len(folder.files()) == 1


def test_two_servers_on_one_folder_stay_within_the_limit(tmp_path):
    """SPEC C9: whatever they write, read and remove in turn; what is read is what was written."""
    random = Random(2)
    servers = [PrefixFolder(tmp_path / "prefixes", 60_000) for _ in range(2)]
    for server in servers:
        server.open()
    written = {}
    for number in range(300):
        server = random.choice(servers)
        if random.random() < 0.5 or not written:
            tokens = key_of([number] * random.randint(1, 50))
            payload = random.randbytes(random.randint(0, 15_000))
            made = server.write(replace(NEW, tokens=tokens), payload)
            for name in made.removed:
                del written[name]
            written[made.file.name] = (tokens, payload)
        elif random.random() < 0.7:
            name = random.choice(list(written))
            tokens, payload = written[name]
            assert server.read(name, SPACE, tokens) == payload
        else:
            name = random.choice(list(written))
            server.remove(name)
            del written[name]
        assert {file.name for file in random.choice(servers).files()} == set(written)
        assert servers[0].total_bytes() == servers[1].total_bytes() <= 60_000


def test_writers_in_two_processes_stay_within_the_limit(folder):
    """SPEC C9: when both have ended, what is left fits and is sound."""
    folder.limit_bytes = 20_000
    code = WRITER + (
        "for _ in range(40):\n"
        "    try: folder.write(new, bytes(5000))\n"
        "    except CacheFileError as error: assert 'being written' in str(error)\n"
    )
    writers = [_start(folder, code) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert 0 < folder.total_bytes() <= folder.limit_bytes
    assert all(verdict.problem == "" for verdict in folder.verify())


def test_clear_leaves_nothing(folder):
    """SPEC C9: sound, damaged, or unfinished."""
    name = folder.write(NEW, PAYLOAD).file.name
    _path(folder, "bad.prefix").write_bytes(b"bad")
    part = _path(folder, "old.part")
    part.touch()
    _age(part, disk.ABANDONED_S + 1)
    assert sorted(folder.clear()) == sorted([name, "bad.prefix"])
    assert _names(folder) == []
    assert PrefixFolder(folder.folder / "nowhere", LIMIT).clear() == []
    assert PrefixFolder(folder.folder / "nowhere", LIMIT).files() == []
