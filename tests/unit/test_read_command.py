"""`stoker read`: a line of JSON a picture, progress on stderr, a broken one holds nobody up."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pictures import plain
from reading_runtime import ReadingRuntime
from stoker.cli.app import app


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one of them broken, and a schema."""
    (tmp_path / "a.png").write_bytes(plain(200, 100))
    (tmp_path / "b.png").write_bytes(b"rubbish")
    (tmp_path / "c.png").write_bytes(plain())
    (tmp_path / "s.json").write_text('{"type": "object", "required": ["n"]}')
    return tmp_path


def stoker(*args, runtime=None):
    """Run the command."""
    return CliRunner().invoke(app, ["read", *map(str, args)], obj=runtime)


def test_each_picture_is_a_line_and_its_progress_another(folder):
    """SPEC V3, V4, I1: answers on stdout; sizes, times and what was shrunk on stderr."""
    runtime = ReadingRuntime('{"n": 1}', '{"n": "ü"}')
    done = stoker(folder / "a.png", folder / "c.png", "--model", "m", "--mmproj", "p.gguf", runtime=runtime)
    assert done.exit_code == 0, done.output
    assert done.stdout == '{"n": 1}\n{"n": "ü"}\n'
    first, second = done.stderr.splitlines()
    assert first.startswith(f"[1/2] {folder}/a.png: 200 x 100 shrunk to 100 x 50, ")
    assert second.startswith(f"[2/2] {folder}/c.png: 40 x 30, ")
    assert (runtime.settings.models, str(runtime.settings.mmproj)) == (("m",), "p.gguf")
    assert runtime.is_closed


def test_a_broken_picture_holds_nobody_up(folder):
    """SPEC V4: the others are read, the exit code says that one was not; long lines say which."""
    names = [folder / name for name in ("a.png", "b.png", "c.png")]
    done = stoker(*names, "--json-lines", runtime=ReadingRuntime('{"n": 1}'))
    assert done.exit_code == 2
    good, bad, last = map(json.loads, done.stdout.splitlines())
    assert good == {"file": str(names[0]), "value": {"n": 1}, "attempts": 1, "shrunk_to": [[100, 50]]}
    assert last["shrunk_to"] == [None]
    assert (bad["file"], bad["error"]["code"]) == (str(names[1]), "invalid_request")
    assert "[2/3]" in done.stderr
    assert "no picture" in done.stderr
    short = stoker(*names, runtime=ReadingRuntime('{"n": 1}'))
    assert short.stdout == '{"n": 1}\n' * 2


def test_a_schema_is_kept_to_or_the_text_is_shown(folder):
    """SPEC V4: asked twice, then an error with the text."""
    args = (folder / "a.png", "--schema", folder / "s.json", "--json-lines")
    done = stoker(*args, runtime=ReadingRuntime("{}", '{"n": 1}'))
    assert json.loads(done.stdout)["attempts"] == 2
    assert "asked 2 times" in done.stderr
    done = stoker(*args, runtime=ReadingRuntime('{"m": 1}'))
    assert done.exit_code == 2
    assert json.loads(done.stdout) | {"file": ""} == {
        "file": "",
        "error": {"code": "reading_failed", "message": json.loads(done.stdout)["error"]["message"]},
        "text": '{"m": 1}',
        "attempts": 2,
    }


def test_a_question_of_its_own_is_asked(folder):
    """SPEC V4: `--ask`, `--max-tokens`."""
    runtime = ReadingRuntime("Kahapo")
    done = stoker(folder / "a.png", "--ask", "Whose?", "-n", "9", runtime=runtime)
    assert done.stdout == '"Kahapo"\n'
    assert "\nWhose?" in runtime.requests[0].prompt
    assert runtime.requests[0].max_tokens == 9


def test_a_schema_may_stand_on_the_command_line(folder):
    """SPEC V4: as with `stoker run`."""
    args = (folder / "a.png", "--schema", (folder / "s.json").read_text(), "--json-lines")
    done = stoker(*args, runtime=ReadingRuntime("{}", '{"n": 1}'))
    assert json.loads(done.stdout)["attempts"] == 2


def test_a_schema_that_is_none_ends_it_at_once(folder):
    """SPEC I1: 2, in one line, before a model is loaded."""
    (folder / "s.json").write_text("{")
    runtime = ReadingRuntime("{}")
    done = stoker(folder / "a.png", "--schema", folder / "s.json", runtime=runtime)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert stoker(folder / "a.png", "--schema", folder / "none.json", runtime=runtime).exit_code == 2
    assert not runtime.requests
