"""An engine starts the devices' drivers before anything asks for devices."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import TYPE_CHECKING

import pytest
from gguf_files import write_tiny

from stoker.backends.llama import binding, reader
from stoker.backends.registry import OpenModels
from stoker.engine import process
from stoker.models.gguf.header import read_header

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader


def test_whoever_asks_for_devices_waits_for_drivers_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L10: the library's start is not begun twice at once, and both get what it found."""
    begun, goes_on, found = Event(), Event(), ((1, "Fake", "one card"),)
    running: list[int] = []

    def native() -> tuple[tuple[int, str, str], ...]:
        running.append(1)
        assert len(running) == 1, "two threads start the drivers"
        begun.set()
        assert goes_on.wait(60)
        running.pop()
        return found

    monkeypatch.setattr(binding, "_native_devices", native)
    monkeypatch.setattr(binding, "_device", lambda _index, *each: each)
    ask = binding.accelerators.__wrapped__
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask)
        assert begun.wait(60)
        second = pool.submit(ask)
        goes_on.set()
        assert first.result(60) == second.result(60) == found


def test_drivers_that_do_not_start_are_told_of_by_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC L10: the beginning is silent; the load that needs a device fails as it would without it."""
    asked = Event()

    def fail() -> tuple[()]:
        asked.set()
        raise OSError("no driver")

    monkeypatch.setattr(binding, "accelerators", fail)
    with caplog.at_level(logging.DEBUG):
        process.begin_devices(OpenModels(), []).join(60)
    assert asked.is_set()
    assert (capfd.readouterr().err, caplog.text) == ("", "")
    with pytest.raises(OSError, match="no driver"):
        binding.accelerators()


def test_an_engine_has_asked_for_devices_before_it_is_told_how_to_run() -> None:
    """SPEC L10: and has imported what reads a GGUF file; bindings come before numpy."""
    code = (
        "import sys\nfrom stoker.engine import process\nprocess.load_native()\n"
        "process.begin_devices(process.OpenModels(), []).join(60)\n"
        "from stoker.backends.llama import binding\n"
        "print(binding.accelerators.cache_info().currsize, 'stoker.backends.llama.backend' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]


def test_headers_of_models_that_were_named_are_read_before_anything_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L10: a load finds them; a file that is none is told of by the load."""
    read: list[Path] = []

    def counted(path: Path) -> GgufHeader:
        read.append(path)
        return read_header(path)

    monkeypatch.setattr(reader, "read_header", counted)
    monkeypatch.setattr(binding, "accelerators", tuple)
    models, path = OpenModels(), write_tiny(tmp_path / "t.gguf")
    process.begin_devices(models, [str(tmp_path / "none.gguf"), f"{tmp_path}/./t.gguf"]).join(60)
    assert read == [path]
    assert models.open(str(path)).describe().architecture == "llama"
    assert read == [path]


def test_a_header_that_several_ask_for_at_once_is_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SPEC L10: on any Python; since 3.12 a cached property may be computed twice at a time."""
    begun, goes_on, read = Event(), Event(), []

    def slow(path: Path) -> GgufHeader:
        read.append(path)
        begun.set()
        goes_on.wait(60)
        return read_header(path)

    monkeypatch.setattr(reader, "read_header", slow)
    model = reader.GgufReader(write_tiny(tmp_path / "t.gguf"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: model.header)
        begun.wait(60)
        second = pool.submit(lambda: model.header)
        for _ in range(200):
            if len(read) > 1:
                break
            sleep(0.001)
        goes_on.set()
        assert first.result() is second.result()
    assert len(read) == 1
