"""What holds prompts, answers and keys is readable by its owner alone."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stoker import Runtime
from stoker.private import make_folder, write_text


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    former = os.umask(0o022)
    yield
    os.umask(former)


@pytest.fixture
def _wants_core_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def everything(folder: Path) -> list[Path]:
    """All files and folders below one."""
    return list(folder.rglob("*"))


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_every_folder_that_is_made_is_private_and_one_that_is_there_stays(tmp_path: Path) -> None:
    """S4, S10: also those above the one that was asked for."""
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    folder = there / "a" / "b"
    make_folder(folder)
    make_folder(folder)
    assert [mode(path) for path in (there, there / "a", folder)] == [0o755, 0o700, 0o700]
    (folder / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        make_folder(folder / "file" / "below")


def test_a_file_is_private_and_put_in_place_whole(tmp_path: Path) -> None:
    """S4, S10: a second text replaces the first; where it cannot be written the first stays."""
    file = tmp_path / "a" / "file.json"
    write_text(file, "one")
    write_text(file, "two")
    assert (file.read_text(), mode(file), mode(file.parent)) == ("two", 0o600, 0o700)
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert [path.read_text() for path in file.parent.iterdir()] == ["two"]


def test_writers_of_one_file_do_not_meet_before_it_is_in_place(tmp_path: Path) -> None:
    """Programs in containers have the same process id, and threads of one program have too."""
    file = tmp_path / "file.json"
    texts = [letter * 10_000 for letter in "abcdefgh"]

    def write(text: str) -> None:
        for _ in range(50):
            write_text(file, text)

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("_wants_core_files")
async def test_nothing_that_a_runtime_leaves_is_readable_by_others(tmp_path: Path) -> None:
    """S4, S10: folders and files of cache, run and states, while it is suspended with a request."""
    folders = {name: tmp_path / "home" / name for name in ("cache_dir", "run_dir", "states_dir")}
    fake = "fake:eog_period=0,step_delay_s=0.01"
    async with Runtime(model=fake, isolation="process", **folders) as runtime:  # type: ignore[arg-type]
        answer = runtime.generate("hello " * 50, max_tokens=400, ignore_eos=True)
        await anext(answer)
        pid = (await runtime.status()).pid
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_CORE) == (0, 0)
        await runtime.suspend()
        found = everything(tmp_path)
        assert {"cache_dir", "run_dir", "models.json", "suspended"} <= {path.name for path in found}
        assert [path for path in found if mode(path) & 0o077] == []
        await answer.aclose()


@pytest.mark.usefixtures("_wants_core_files")
def test_a_server_leaves_no_core_file() -> None:
    """S4, S10: its memory holds prompts and keys; an application that embeds a runtime decides for itself."""
    script = (
        "import resource\n"
        "from stoker.server import serve\n"
        "from stoker.settings import EngineSettings, ServerSettings\n"
        "limits = []\n"
        "serve.bind = lambda *_: limits.append(resource.getrlimit(resource.RLIMIT_CORE)) or 1 / 0\n"
        "try:\n"
        "    serve.run_server(EngineSettings(), ServerSettings())\n"
        "except ZeroDivisionError:\n"
        "    print(limits)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(0, 0)]"
