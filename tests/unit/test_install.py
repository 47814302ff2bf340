"""The bootstrap behind the Makefile: what it says and what it refuses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NINJA_LINE = "  [96/193] /usr/bin/c++ -DGGML_BUILD -O3 -c ggml.cpp\n"


@pytest.fixture
def install() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_compilation_shows_how_far_it_is(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of compiling are not silent; on a pipe it is a line now and then."""
    monkeypatch.setattr(install, "SLOW_REPORT_S", 0.0)
    progress = install.Progress("building llama.cpp")
    progress.note(NINJA_LINE)
    progress.show()
    progress.note("some other line")
    progress.show()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("building llama.cpp" in line and "96/193 (49 %)" in line for line in lines)


def test_nothing_is_said_before_it_is_time(install: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Thousands of compiler lines do not become thousands of lines here."""
    progress = install.Progress("building llama.cpp")
    progress.note(NINJA_LINE)
    progress.show()
    assert capsys.readouterr().out == ""


def test_a_python_that_is_too_old_is_named(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which version is needed and how to choose another."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(install.SetupError, match=r"3\.11 or newer.*\n.*make PYTHON="):
        install.check_python()


def test_a_python_without_venv_is_told_what_to_install(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's python3 without python3-venv."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(install.SetupError, match="apt install python3-venv"):
        install.check_python()


def test_a_machine_without_compiler_is_told_what_to_install(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler and no ready-made wheel is one clear message."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert install.find_compiler() is None
    with pytest.raises(install.SetupError, match=r"apt install g\+\+"):
        install._install_native([sys.executable, "-c", "raise SystemExit(1)"], {}, None, tmp_path / "log")


def test_flags_are_given_only_to_a_compiler_that_takes_them(install: ModuleType, tmp_path: Path) -> None:
    """An unknown flag would stop the build."""
    picky = tmp_path / "c++"
    picky.write_text('#!/bin/sh\ncase "$*" in *-mno-amx*) exit 1;; esac\n', encoding="ascii")
    picky.chmod(0o755)
    assert not install.accepts(str(picky), install.NO_AMX)
    assert install.accepts(str(picky), ())


def test_a_failure_of_pip_shows_the_end_of_its_output(install: ModuleType, tmp_path: Path) -> None:
    """The reason is on the screen, all of it in the log."""
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(1)"]
    with pytest.raises(install.SetupError, match="no space left"):
        install.run_pip("installing", command, {}, tmp_path / "log")
    assert "no space left" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_native_library_is_pinned_exactly(install: ModuleType) -> None:
    """Pinned versions, the same in both files."""
    pin = install._native_pin()
    assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
