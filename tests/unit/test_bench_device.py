"""The benchmark of an accelerator: its lines, table, programs and turns; nothing timed for real."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from bench.__main__ import main
from bench.crowd_client import Answer
from bench.device import command, session
from bench.device.contestants import (
    LIMIT,
    PEER,
    PEER_ON_DEVICE,
    STOKER,
    DeviceShape,
    LlamaOnDevice,
    Programs,
    StokerOnDevice,
)
from bench.device.lines import Line, Lines
from bench.device.rows import ON_ITS_WAY_S, Served, rows_of_few, steady
from bench.device.session import _on_each, limited
from bench.device.table import Judged, judged
from bench.errors import BenchError
from bench.peers import Shape
from bench_stand_in import StandIn, serving

from tiny_models import write_llama

SHAPE = DeviceShape(64, 4352)
SMALL = ["--device", "--rows", "1,2", "--tokens", "4", "--slots", "4", "--ctx-slot", "1024"]
SMALL += ["--long-words", "8", "--prompt-words", "8"]


def measured(*given: tuple[str, str, dict[str, float]], size_bytes: float = 3e9) -> Lines:
    """Lines of one model: server, row, values."""
    lines = Lines()
    lines.add(Line(model="m", row="file", values={"size_bytes": size_bytes}))
    for server, row, values in given:
        lines.add(Line(model="m", server=server, row=row, values=values))
    return lines


def speeds(row: str, **by_server: float) -> list[tuple[str, str, dict[str, float]]]:
    """Tokens a second of that row on each server."""
    names = {"stoker": STOKER, "peer": PEER, "on_device": PEER_ON_DEVICE, "limit": LIMIT}
    return [
        (names[name], row.partition("-")[0] if name == "limit" else row, {"tokens_per_s": value})
        for name, value in by_server.items()
    ]


def row_of(lines: Lines, title: str) -> Judged:
    """The row whose title begins so."""
    return next(row for row in judged(lines, "m") if row.title.startswith(title))


# ---------------------------------------------------------------- table


@pytest.mark.parametrize(
    ("row", "speed", "others", "is_good"),
    [
        ("single-greedy", 100, {"peer": 100, "on_device": 100, "limit": 107}, True),
        ("single-greedy", 100, {"peer": 101}, False),
        ("single-greedy", 100, {"limit": 108}, False),
        ("fan8-sampled", 110, {"peer": 110, "on_device": 100, "limit": 129}, True),
        ("fan8-sampled", 109, {"on_device": 100}, False),
        ("fan32-greedy", 100, {"peer": 90, "limit": 1000}, True),
        ("fan64-greedy", 700, {"limit": 1000}, True),
        ("fan64-greedy", 699, {"limit": 1000}, False),
        ("fan64-greedy", 100, {}, None),
    ],
)
def test_a_crowd_is_held_against_each_bar(
    row: str, speed: float, others: dict[str, float], *, is_good: bool | None
) -> None:
    """O4: llama-server, its sampling on the device, and the limit, each where it was measured."""
    found = row_of(measured(*speeds(row, stoker=speed, **others)), row)
    assert found.is_good is is_good


def test_the_larger_model_has_the_higher_bar_at_64_rows() -> None:
    """O4: 0.7 of the limit, 0.8 above six gigabytes."""
    lines = speeds("fan64-greedy", stoker=750, limit=1000)
    assert row_of(measured(*lines), "fan64").is_good
    assert row_of(measured(*lines, size_bytes=16e9), "fan64").is_good is False


def test_delays_are_better_when_they_are_less() -> None:
    """O4: first tokens and starts at the peer's, within their bars; long contexts against short ones."""
    lines = measured(
        (STOKER, "fan2-greedy", {"tokens_per_s": 1, "first_p50_s": 0.5, "steady_tokens_per_s": 100}),
        (PEER, "fan2-greedy", {"tokens_per_s": 1, "first_p50_s": 0.4}),
        (STOKER, "start", {"ready_s": 2.5}),
        (PEER, "start", {"ready_s": 2.0}),
        (STOKER, "crash", {"gap_s": 3.1}),
        (STOKER, "interactive", {"first_p95_s": 0.09}),
        (STOKER, "long-greedy", {"steady_tokens_per_s": 89}),
        (STOKER, "pair-one", {"tokens_per_s": 100}),
        (STOKER, "pair-both", {"tokens_per_s": 191}),
        (STOKER, "gate-direct", {"tokens_per_s": 100}),
        (STOKER, "gate-one", {"tokens_per_s": 90}),
        (STOKER, "gate-both", {"tokens_per_s": 189}),
    )
    verdicts = {
        title: row_of(lines, title).is_good
        for title in ("fan2 p50", "start", "crash", "interactive", "long", "pair", "gate")
    }
    assert list(verdicts.values()) == [False, True, False, True, False, True, False]
    assert row_of(lines, "start").cells == ["start, s", "2.5", "2 0.80≥0.77", "", "", "good"]
    assert row_of(lines, "pair").cells == ["pair of one", "191 1.91≥1.9", "", "", "", "good"]


def test_values_are_medians_over_rounds_and_runs(tmp_path: Path) -> None:
    """O4: each line is in the file as soon as it is there, and several files make one table."""
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, values in zip(files, ([1.0, 5.0], [3.0]), strict=True):
        lines = Lines(path)
        for number, value in enumerate(values, start=1):
            lines.add(
                Line(model="m", server=PEER, row="single-greedy", round=1, values={"tokens_per_s": value})
            )
            assert len(path.read_text().splitlines()) == number
    read = Lines.read(files)
    assert read.value("m", PEER, "single-greedy", "tokens_per_s") == 3.0
    assert read.value("m", STOKER, "single-greedy", "tokens_per_s") is None


def test_the_steady_speed_is_that_of_all_together() -> None:
    """O4: only what comes while every stream writes, by tokens and not by events."""

    def answer(first_s: float, last_s: float, num_tokens: int) -> Answer:
        count = 10
        step_s = (last_s - first_s) / (count - 1)
        return Answer(
            sent_s=0.0,
            first_s=first_s,
            last_s=last_s,
            num_tokens=num_tokens,
            num_prompt_tokens=1,
            arrivals=tuple((first_s + i * step_s, 1) for i in range(count)),
        )

    both = steady([answer(0.0, 9.0, 20), answer(4.5, 13.5, 10)])
    assert both["steady_tokens_per_s"] == pytest.approx((5 * 2 + 4) / 4.5)
    assert steady([answer(0.0, 1.0, 10), answer(1.0, 2.0, 10)]) == {}


# ---------------------------------------------------------------- servers and programs


def test_every_server_is_told_the_same_slots_and_context() -> None:
    """O4: llama-server divides its context by its slots, Stoker is told both."""
    alike = Shape(64, SHAPE.num_cells, None)
    peer = LlamaOnDevice(Path("b"), Path("m"), SHAPE, ("--backend-sampling",)).command(alike, 1)
    assert (peer[peer.index("-np") + 1], peer[peer.index("-c") + 1]) == ("64", str(64 * 4352))
    assert peer[-1] == "--backend-sampling"
    own = StokerOnDevice((Path("a"), Path("b")), SHAPE, Path("c"), ("--x",)).command(alike, 1)
    told = {flag: own[own.index(flag) + 1] for flag in ("--slots", "--ctx-size")}
    assert told == {"--slots": "64", "--ctx-size": "4352"}
    assert own.count("--model") == 2
    assert _on_each([Path("x/first.gguf"), Path("x/second.gguf")]) == (
        *("--placement", "first:device=0"),
        *("--placement", "second:device=1"),
    )


def program(folder: Path, name: str, said: str, status: int = 0) -> None:
    """A program that says that and ends so."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def peer_dir(tmp_path: Path) -> Path:
    """Programs that say what llama.cpp's say, and a server that does not start."""
    folder = tmp_path / "peer"
    folder.mkdir()
    program(folder, "llama-server", "no such device", status=1)
    program(folder, "llama-bench", '{"n_gen": 4, "avg_ts": 410.5}')
    rows = [json.dumps({"pl": number, "speed_tg": 1000.0 * number}) for number in (2,)]
    program(folder, "llama-batched-bench", "\n".join(["a log line", *rows]))
    return folder


@pytest.mark.long
def test_a_run_measures_what_it_can_and_tells_the_rest(
    peer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O4: the limit from the programs' own lines; a server that does not start is a line; Stoker's crowds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, kept = write_llama(tmp_path / "tiny.gguf", context=1024), tmp_path / "lines.jsonl"
    asked = [*SMALL, "--model", str(model), "--peer-dir", str(peer_dir), "--json", str(kept)]
    assert main([*asked, "--only", "single,fan2,start,limit,crash"]) == 1
    lines = Lines.read([kept])
    assert lines.value("tiny.gguf", LIMIT, "single", "tokens_per_s") == 410.5
    assert lines.value("tiny.gguf", LIMIT, "fan2", "tokens_per_s") == 2000.0
    assert [error.split(" ")[1] for error in lines.errors()] == [PEER, PEER_ON_DEVICE]
    assert all("ended with code 1" in error for error in lines.errors())
    for row in ("single-greedy", "single-sampled", "fan2-greedy", "fan2-sampled"):
        assert lines.value("tiny.gguf", STOKER, row, "tokens_per_s")
    assert lines.value("tiny.gguf", STOKER, "start", "ready_s")
    gap_s = lines.value("tiny.gguf", STOKER, "crash", "gap_s")
    assert gap_s is not None
    assert gap_s > ON_ITS_WAY_S
    shown = capsys.readouterr().out
    assert "could not be measured: tiny.gguf llama-server start" in shown
    assert main(["--device", "--show", str(kept)]) == 1
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line.startswith("fan2-greedy ")]


@pytest.mark.long
def test_a_gate_before_two_servers_is_asked_by_the_crowd_that_asks_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O4: twice as many streams as a server has slots, each of which writes all its tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(session, "_on_card", lambda _: ())
    model, kept = write_llama(tmp_path / "tiny.gguf", context=1024), tmp_path / "lines.jsonl"
    main([*SMALL, "--model", str(model), "--json", str(kept), "--servers", STOKER, "--only", "gate"])
    lines = Lines.read([kept])
    assert lines.errors() == []
    for row in ("gate-direct", "gate-one", "gate-both"):
        assert lines.value("tiny.gguf", STOKER, row, "tokens_per_s")
    assert [row.title for row in judged(lines, "tiny.gguf")] == ["gate of one"]


def test_a_run_whose_time_is_up_says_what_it_left_out(
    peer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O4: nothing begins after the budget."""
    model = tmp_path / "any.gguf"
    model.write_bytes(b"x")
    asked = [*SMALL, "--model", str(model), "--peer-dir", str(peer_dir), "--budget", "-1"]
    assert main(asked) == 1
    shown = " ".join(capsys.readouterr().out.split())
    for what in ("any.gguf: limit", "any.gguf: llama-server, single-greedy", "any.gguf: stoker, interactive"):
        assert "for want of time" in shown
        assert f"left out: {what}" in shown


async def test_what_hangs_costs_no_more_than_its_limit() -> None:
    """O4: it is an error with a sentence, as any other."""
    with pytest.raises(BenchError, match=r"fan8 did not come to its end within 0 s"):
        async with limited(0, "fan8 did not come to its end"):
            await asyncio.Event().wait()


def test_a_busy_client_makes_a_row_doubtful() -> None:
    """O4: what is slow there may be the client."""
    lines = Lines()
    lines.add(Line(model="m", server=STOKER, row="fan64-greedy", client_busy=0.95))
    lines.add(Line(model="m", server=STOKER, row="fan8-greedy", client_busy=0.3))
    assert lines.doubts() == ["m stoker fan64-greedy: the client took 0.95 of a core"]


async def test_an_engine_that_nobody_tells_of_is_not_killed() -> None:
    """O4: the crash is of a process of the server's own."""
    (crash,) = (row for row in rows_of_few() if row.name == "crash")
    async with serving(StandIn()) as url:
        with pytest.raises(BenchError, match=r"before its time|no engine"):
            await crash.run(Served(url, ("m",), 1, "seed"))


def test_programs_are_found_in_their_folder(peer_dir: Path, tmp_path: Path) -> None:
    """O4: a folder without llama-server is refused; what else is missing is not measured."""
    (peer_dir / "llama-bench").unlink()
    found = Programs.found(peer_dir)
    assert found.missing == ["llama-bench"]
    assert (found.bench, found.server) == (None, peer_dir / "llama-server")
    with pytest.raises(BenchError, match="no llama-server"):
        Programs.found(tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--only", "fan9"], "--only knows no fan9; it takes single, fan8"),
        (["--servers", "vllm"], "--servers knows no vllm"),
        (["--rows", "1,x"], "--rows takes numbers"),
        (["--rows", "128"], "need as many --slots, which are 64"),
        (["--ctx-slot", "1024"], "need a larger --ctx-slot"),
        (["--repeat", "0"], "--repeat must be at least 1"),
    ],
)
def test_wrong_options_are_named(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """O4: with what they take."""
    with pytest.raises(SystemExit):
        command.parse_device_arguments(given)
    assert words in " ".join(capsys.readouterr().err.split())
