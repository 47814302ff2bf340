"""Engines that die because a page of a mapped model file cannot be read (SIGBUS)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stoker import Runtime
from stoker.client.process.exit import EngineExit, OomCounter, UnreadFiles, judge
from stoker.client.process.transport import ExitReport
from stoker.errors import EngineCrashedError, ModelFileError, ModelReadError
from tiny_models import write_moe

MIB = 2**20


def ended(number: int) -> EngineExit:
    """The reading of the end by a signal."""
    return judge(ExitReport(-number), None, OomCounter(Path("/none")))


def test_a_bus_error_is_a_page_that_could_not_be_read(tmp_path: Path) -> None:
    """SPEC R15: the reason names the mapped files, one that was cut alone; the first is kept."""
    assert not ended(signal.SIGSEGV).is_unread
    assert isinstance(ended(signal.SIGSEGV).error("it died 3 times, last", 3), EngineCrashedError)
    files, end = UnreadFiles(), ended(signal.SIGBUS)
    sound, cut = write_moe(tmp_path / "sound.gguf"), write_moe(tmp_path / "cut.gguf")
    first = files.explain(end, {"a": str(sound)})
    assert f"{sound} of a is as long as it should be" in first.reason
    os.truncate(cut, cut.stat().st_size // 2)
    second = files.explain(end, {"a": str(sound), "b": str(cut)})
    assert "truncated" in second.reason
    assert str(sound) not in second.reason
    error = second.error("it died 3 times, last", 3)
    assert isinstance(error, ModelReadError)
    assert (error.details["crashes"], error.details["first"]) == (3, first.reason)
    assert files.explain(ended(signal.SIGSEGV), {"a": str(sound)}) == ended(signal.SIGSEGV)


async def test_a_request_that_needs_what_cannot_be_read_gets_a_typed_error(tmp_path: Path) -> None:
    """SPEC R15: after three engines; others are served meanwhile and afterwards."""
    folders = {name: tmp_path / name for name in ("cache_dir", "run_dir", "models_dir")}
    model = "fake:id=a,eog_period=0,bus_tokens=90"
    async with Runtime(model=model, isolation="process", ctx_size=512, **folders) as runtime:
        with pytest.raises(ModelReadError, match="page of a mapped file could not be read") as caught:
            await _text(runtime, "Z")
        assert caught.value.details["crashes"] == 3
        assert "could not be read" in caught.value.details["first"]
        assert await _text(runtime, "a")
        exits = (await runtime.status()).exits
        assert all("could not be read" in each.reason for each in exits)


async def test_a_file_that_is_cut_under_an_engine_ends_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    """SPEC R14, R15: experts are read when they are needed; the engine dies, the next says why."""
    path = write_moe(tmp_path / "m.gguf", num_layers=4, num_experts=16, width=512)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    folders = {name: tmp_path / name for name in ("cache_dir", "run_dir", "models_dir")}
    async with Runtime(
        model=path, isolation="process", ctx_size=512, slots=1, device=("none",), expert_budget=MIB, **folders
    ) as runtime:
        assert await _text(runtime, "hello")
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ModelFileError, match="truncated"):
            await _text(runtime, "world")
        (end,) = (await runtime.status()).exits
        assert "SIGBUS" in end.reason
        assert "truncated" in end.reason


async def _text(runtime: Runtime, prompt: str) -> str:
    fields = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
    return "".join([delta.text async for delta in runtime.generate(prompt, **fields)])
