"""The run file of a server: found while its process lives, gone with it, and no wrong file in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import msgspec
import pytest

from stoker.server.run_file import FOLDER_NAME, RunFile, found_servers, registered, url_of


def entry(pid, started_at=1.0):
    """A server's own account."""
    return RunFile(
        url="http://127.0.0.1:1", pid=pid, version="1", started_at=started_at, models={"m": "/m.gguf"}
    )


def test_a_server_is_found_from_ready_to_exit_by_its_owner_alone(tmp_path):
    """T4: the file is there while the server is, mode 0600, and tells all that was said."""
    own = entry(os.getpid())
    with registered(tmp_path, own):
        (file,) = (tmp_path / FOLDER_NAME).iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert found_servers(tmp_path) == [own]
    assert found_servers(tmp_path) == []


def test_what_a_crash_or_another_program_left_is_removed(tmp_path):
    """T4: a file of a process that is gone, and one that is none of ours, mislead nobody."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    folder = tmp_path / FOLDER_NAME
    folder.mkdir()
    (folder / f"{gone.pid}.json").write_bytes(msgspec.json.encode(entry(gone.pid)))
    (folder / "notes.json").write_text("[1")
    (folder / f"{10**30}.json").write_text("{}")
    assert found_servers(tmp_path) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", [b'{"url": 1}', b'{"url": "\xff\xfe"}', b""])
def test_a_file_that_cannot_be_read_stays_while_its_server_lives(content, tmp_path):
    """T4: a server of another version is passed over, and still found by the commands of that version."""
    file = tmp_path / FOLDER_NAME / f"{os.getpid()}.json"
    file.parent.mkdir()
    file.write_bytes(content)
    assert found_servers(tmp_path) == []
    assert file.exists()


def test_of_several_servers_the_last_started_stands_first(tmp_path):
    """T4: which one a command asks does not depend on the order of a folder."""
    with registered(tmp_path, entry(os.getpid(), 1.0)), registered(tmp_path, entry(os.getppid(), 2.0)):
        assert [found.started_at for found in found_servers(tmp_path)] == [2.0, 1.0]


def test_a_folder_that_cannot_be_written_does_not_stop_the_server(tmp_path, caplog):
    """T4: it is served without being found, and the log says so."""
    (tmp_path / FOLDER_NAME).write_text("a file where the folder should be")
    with registered(tmp_path, entry(os.getpid())):
        assert "will not find this server" in caplog.text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),  # noqa: S104 - what is bound, not bound here
        ("::", "http://[::1]:7"),
        ("::1", "http://[::1]:7"),
        ("localhost", "http://localhost:7"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host, url):
    """T4: a server bound to every address is asked at the loopback one."""
    assert url_of(host, 7) == url
