"""What `stoker doctor` says of a store that machines share (SPEC C19)."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.radix import key_of
from stoker.cache.shared.files import SharedFiles
from stoker.cache.shared.names import ROOT, place_of
from stoker.cli.commands import doctor
from stoker.cli.commands.doctor import prefix_store
from stoker.cli.doctor.finding import Finding
from stoker.settings import EngineSettings


def only(found: Any) -> Finding:
    """The one finding."""
    (finding,) = list(found)
    return finding


def test_without_a_store_nothing_is_said() -> None:
    """C19: it is opt-in."""
    assert list(prefix_store(None)) == []


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_store_is_tried_and_counted(tmp_path: Path, kind: str) -> None:
    """C19: one file goes there and back, and nothing is left of it."""
    url = str(tmp_path / "store") if kind == "folder" else f"memory://{uuid.uuid4().hex}"
    files = SharedFiles(url)
    files.put(NewPrefix(bytes(32), "m", "", key_of(range(40))), place_of("m", ""), memoryview(b"x" * 1800))
    finding = only(prefix_store(url))
    assert finding.level == "ok"
    assert finding.text.startswith(f"{url}: 1 shared prefix, 2 KiB, ")
    assert "ms" in finding.text
    assert len(files.list()) == 1
    if kind == "folder":
        assert len(list((tmp_path / "store" / ROOT).iterdir())) == 1


def test_a_store_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    """C19: with the reason, and what it means."""
    (tmp_path / "store").write_text("no folder")
    finding = only(prefix_store(str(tmp_path / "store")))
    assert finding.level == "broken"
    assert "cannot be written" in finding.text
    assert "each machine computes for itself" in finding.remedy


def test_a_store_that_hangs_is_waited_for_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: the other findings come all the same."""
    gate = threading.Event()
    monkeypatch.setattr(SharedFiles, "probe", lambda _: gate.wait(60))
    finding = only(prefix_store("memory://x", 0.05))
    gate.set()
    assert (finding.level, "does not answer within 0.05 s" in finding.text) == ("broken", True)


def test_an_unknown_kind_of_store_is_said(tmp_path: Path) -> None:
    """C19: as fsspec says it."""
    finding = only(prefix_store("nosuch://x"))
    assert finding.level == "broken"
    assert "nosuch" in finding.text


def test_the_examination_has_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C19: where the setting is there."""
    for name in ("_build", "backends", "_accelerators", "_models", "_calibrations", "_smoke", "_proofs"):
        monkeypatch.setattr(doctor, name, lambda *_: iter(()))
    for store, count in ((None, 0), (str(tmp_path / "store"), 1)):
        found = doctor.examine(EngineSettings(cache_dir=tmp_path, models_dir=tmp_path, prefix_store=store))
        assert sum(each.subject == "store" for each in found) == count
