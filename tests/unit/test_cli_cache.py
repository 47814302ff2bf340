"""`stoker cache`: what it says of the files on disk and what it does to them."""

import json

import pytest
from typer.testing import CliRunner

from stoker.cache.disk.files import PrefixFolder
from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.radix import key_of
from stoker.cli.app import app

PAYLOAD = bytes(2000)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the command finds by its settings, with two prefixes of two models."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STOKER_CACHE_DISK_BYTES", "1MB")
    made = PrefixFolder(tmp_path / "cache" / "prefixes", 1_000_000)
    made.open()
    made.write(NewPrefix(bytes(32), "f1", "/models/one[red].gguf", key_of(range(40))), PAYLOAD)
    made.write(NewPrefix(bytes(32), "f2", "/models/two.gguf", key_of(range(64)), is_background=True), PAYLOAD)
    return made


def _invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, ["cache", *arguments], input=stdin)


def _damage(folder):
    name = folder.files()[0].name
    path = folder.folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return name


def test_the_help_names_the_four_commands():
    """SPEC C9: found without reading a manual."""
    done = _invoke("--help")
    assert done.exit_code == 0
    assert all(command in done.stdout for command in ("ls", "size", "clear", "verify"))


def test_ls_shows_each_prefix_with_its_model_tokens_and_size(folder):
    """SPEC C9: what the disk tier holds."""
    done = _invoke("ls")
    assert done.exit_code == 0
    for file in folder.files():
        (line,) = [line for line in done.stdout.splitlines() if file.name in line]
        assert line.startswith(f"{file.num_tokens} ")
        assert file.source.removeprefix("/models/") in line
        assert ("background" if file.is_background else "interactive") in line
    assert str(folder.folder) in done.stdout


def test_ls_speaks_json(folder):
    """SPEC C9: for programs."""
    records = json.loads(_invoke("ls", "--json").stdout)
    assert {record["name"] for record in records} == {file.name for file in folder.files()}
    assert {(record["model"], record["fingerprint"], record["num_tokens"]) for record in records} == {
        ("/models/one[red].gguf", "f1", 40),
        ("/models/two.gguf", "f2", 64),
    }


def test_size_shows_what_is_taken_and_what_may_be(folder):
    """SPEC C7, C9: the bound is the one of the settings."""
    total = folder.total_bytes()
    assert _invoke("size").stdout == f"{total / 1024:.1f} KiB of 977 KiB, 2 prefixes, in {folder.folder}\n"
    record = json.loads(_invoke("size", "--json").stdout)
    assert record["size_bytes"] == total
    assert record["limit_bytes"] == 1_000_000
    assert (record["num_files"], record["num_tokens"]) == (2, 104)


def test_looking_changes_nothing(folder):
    """SPEC C9: a smaller limit for the one who looks removes no file of a server's."""
    before = folder.files()
    for command in ("ls", "size", "verify"):
        done = CliRunner().invoke(app, ["cache", command], env={"STOKER_CACHE_DISK_BYTES": "1"})
        assert done.exit_code == 0
    assert folder.files() == before


def test_clear_asks_first(folder):
    """SPEC C9: no, silence and an end of input leave everything."""
    for answer in ("n\n", "\n", ""):
        done = _invoke("clear", stdin=answer)
        assert done.exit_code == 1
        assert "Remove" in done.output
        assert len(folder.files()) == 2
    done = _invoke("clear", stdin="y\n")
    assert done.exit_code == 0
    assert "removed 2 files" in done.stdout
    assert folder.files() == []


def test_clear_does_not_ask_when_told_yes(folder):
    """SPEC C9: for scripts."""
    done = _invoke("clear", "--yes")
    assert done.exit_code == 0
    assert done.stdout.startswith("removed 2 files, ")
    assert list(folder.folder.iterdir()) == []


def test_verify_finds_all_sound(folder):
    """SPEC C9: and says how many."""
    done = _invoke("verify")
    assert (done.exit_code, done.stdout) == (0, "2 files sound, 0 damaged\n")


def test_verify_removes_what_is_damaged_and_says_so(folder):
    """SPEC C9: one flipped bit in a state."""
    name = _damage(folder)
    done = _invoke("verify")
    assert done.exit_code == 1
    assert f"{name}: its state has another checksum than was written; removed\n" in done.stdout
    assert "1 file sound, 1 damaged" in done.stdout
    assert not (folder.folder / name).exists()
    assert _invoke("verify").exit_code == 0


def test_verify_can_leave_what_is_damaged(folder):
    """SPEC C9: for whoever wants to see it."""
    name = _damage(folder)
    done = _invoke("verify", "--keep", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "num_sound": 1,
        "damaged": [
            {
                "name": name,
                "problem": "its state has another checksum than was written",
                "is_removed": False,
            }
        ],
    }
    assert (folder.folder / name).exists()


def test_a_folder_that_was_never_made_is_empty(tmp_path, monkeypatch):
    """SPEC C9: nothing is made by looking."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "nowhere"))
    assert "nothing is stored" in _invoke("ls").stdout
    assert json.loads(_invoke("ls", "--json").stdout) == []
    assert _invoke("size").stdout.startswith("0 B of ")
    assert _invoke("clear", "--yes").stdout == "removed 0 files, 0 B\n"
    assert _invoke("verify").stdout == "0 files sound, 0 damaged\n"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    """SPEC C9: exit code 2, as for every fault of the machine."""
    (tmp_path / "prefixes").write_bytes(b"")
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    for command in (["ls"], ["size"], ["clear", "--yes"], ["verify"]):
        done = _invoke(*command)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"stoker: the prefix cache in {tmp_path}")
