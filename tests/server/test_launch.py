"""Coding agents started against the running server: what they are told, and what keeps them from starting."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """#!{python}
import json, os, sys
json.dump({{"args": sys.argv[1:], "env": dict(os.environ)}}, sys.stdout)
sys.exit(7)
"""


@pytest.fixture
def launched(_fake, tmp_path, monkeypatch):
    """Runs `stoker launch` with stand-ins for the programs on the PATH."""
    for name in ("claude", "codex", "aider", "opencode"):
        file = tmp_path / name
        file.write_text(PROGRAM.format(python=sys.executable))
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the vendor")

    def run(*args, url=_fake.url):
        command = [sys.executable, "-m", "stoker.cli", "launch", "--url", url, *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    run.url = _fake.url
    return run


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("claude", {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "k1", "ANTHROPIC_MODEL": "fake"}),
        ("codex", {"STOKER_API_KEY": "k1"}),
        (
            "aider",
            {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "k1", "AIDER_MODEL": "openai/fake"},
        ),
        ("opencode", {}),
    ],
)
def test_a_program_takes_this_ones_place_and_is_told_where_to_ask(launched, program, told):
    """W8: with its arguments, its exit code, and no key on the terminal."""
    ended = launched(program, "--api-key", "k1", "--", "-p", "say hi", "--model")
    assert ended.returncode == 7, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["args"][-3:] == ["-p", "say hi", "--model"]
    for name, value in told.items():
        assert seen["env"][name] == value.format(url=launched.url)
    assert "k1" not in ended.stderr
    assert f"stoker: {next(iter(told), 'OPENCODE_CONFIG_CONTENT')}=" in ended.stderr
    everything = json.dumps(seen)
    assert launched.url in everything
    if program == "claude":
        assert "ANTHROPIC_API_KEY" not in seen["env"]
    if program == "codex":
        assert 'model_provider="stoker"' in seen["args"]
    if program == "opencode":
        config = json.loads(seen["env"]["OPENCODE_CONFIG_CONTENT"])
        assert config["model"].removeprefix("stoker/") in config["provider"]["stoker"]["models"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("cladue",), "did you mean claude?"),
        (("claude", "--model", "nothing"), "serves no model 'nothing'"),
    ],
)
def test_what_cannot_be_started_is_told_in_a_line(launched, args, text):
    """W8: an unknown program, a model that is not served."""
    ended = launched(*args)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_that_is_not_there_and_a_server_that_does_not_run_are_told(launched, tmp_path):
    """W8: before anything is set."""
    (tmp_path / "aider").unlink()
    assert "no program aider on the PATH" in launched("aider").stderr
    ended = launched("claude", url="http://127.0.0.1:9")
    assert (ended.returncode, ended.stdout) == (2, "")
