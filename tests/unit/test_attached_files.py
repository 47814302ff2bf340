"""Files beside a prompt on the command line: documents and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdfs import pdf
from recordings import tone, wav_of
from stoker.cli.app import app


def stoker(*arguments: str, stdin: str | None = None) -> Any:
    """One call of the program."""
    return CliRunner().invoke(app, list(arguments), input=stdin)


def told(*arguments: str) -> dict[str, Any]:
    """What `run --json` prints of a model that sees, or hears, nothing but text."""
    done = stoker("run", "Hi", "--no-server", "--json", "-n", "4", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_documents_and_recordings_stand_before_the_prompt(tmp_path: Path) -> None:
    """V9, V12: as `--image` does; each may be given several times."""
    (tmp_path / "a.pdf").write_bytes(pdf("Rain in Bonn", "Sun in Rome"))
    (tmp_path / "b.md").write_text("# Wind")
    bare = told("-m", "fake:eog_period=0")
    one = told("-m", "fake:eog_period=0", "--file", str(tmp_path / "a.pdf"))
    two = told("-m", "fake:eog_period=0", "--file", str(tmp_path / "a.pdf"), "--file", str(tmp_path / "b.md"))
    assert bare["prompt_tokens"] < one["prompt_tokens"] < two["prompt_tokens"]
    (tmp_path / "a.wav").write_bytes(wav_of(tone()))
    heard = told("-m", "fake:eog_period=0,hearing=1", "--audio", str(tmp_path / "a.wav"))
    assert heard["prompt_tokens"] > bare["prompt_tokens"]


@pytest.mark.parametrize(
    ("model", "option", "content", "text"),
    [
        ("fake:", "--audio", b"x", "the model fake takes no recordings: it has no hearing"),
        ("fake:", "--file", b"%PDF-1.4", "a.bin cannot be read: "),
        ("fake:", "--file", b"PK\x03\x04", "a.bin is an archive"),
        ("fake:", "--file", None, "a.bin: the document cannot be read: No such file"),
        ("fake:hearing=1", "--audio", None, "a.bin: the recording cannot be read: No such file"),
        ("fake:hearing=1", "--audio", b"%PDF-", "a PDF document is not taken"),
    ],
)
def test_a_file_that_is_not_taken_is_named_as_it_was_written(
    tmp_path: Path, model: str, option: str, content: bytes | None, text: str
) -> None:
    """T2, V12: one line, no place in a body, and the exit code of a wrong input."""
    file = tmp_path / "a.bin"
    if content is not None:
        file.write_bytes(content)
    done = stoker("run", "Hi", "--no-server", "-m", model, option, str(file))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert text in done.stderr
    assert "messages." not in done.stderr


def chat(lines: list[str], *options: str, orders: str = "") -> Any:
    """A chat of these lines, whose model says "One." to the first turn."""
    script = Path("script")
    script.write_text("One.\fTwo.", encoding="utf-8")
    words = ["chat", "-m", f"fake:script={script}{orders}", "--no-server", *options]
    return stoker(*words, stdin="".join(f"{line}\n" for line in lines))


@pytest.mark.long
def test_a_chat_takes_documents_and_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V9, V12: they go with the next turn, are said and saved; what cannot be read is not attached."""
    monkeypatch.chdir(tmp_path)
    Path("a.pdf").write_bytes(pdf("Rain in Bonn"))
    Path("scan.pdf").write_bytes(pdf(""))
    Path("a.wav").write_bytes(wav_of(tone()))
    lines = ["/file scan.pdf", "/file a.pdf", "/audio a.wav", "/file", "What?", "/file", "/audio"]
    result = chat([*lines, "/save a.md", "/save a.json"], orders=",hearing=1")
    told = result.stderr
    assert result.stdout == "One.\n"
    assert "stoker: scan.pdf has no text on 1 page, perhaps it is a scan" in told
    assert "a.pdf goes with the next turn, " in told
    assert "a.wav goes with the next turn, 0.5 seconds" in told
    assert "with the next turn: a.pdf, a.wav" in told
    assert "no document goes with the next turn; /file FILE attaches one" in told
    assert "no recording goes with the next turn; /audio FILE attaches one" in told
    saved = Path("a.md").read_text(encoding="utf-8")
    assert f"[a.pdf]({Path('a.pdf')})" in saved
    assert "![" not in saved
    turn = json.loads(Path("a.json").read_text(encoding="utf-8"))["messages"][0]
    assert (turn["documents"], turn["recordings"]) == (["a.pdf"], ["a.wav"])
    assert "takes no recordings" in chat(["/audio a.wav", "Hi"]).stderr
    assert chat(["Hi"], "--file", "scan.pdf").exit_code == 2
    assert chat(["Hi"], "--file", "a.pdf").stdout == "One.\n"
