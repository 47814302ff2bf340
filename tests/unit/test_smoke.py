"""The smoke decode: real child processes that really die, and what is remembered of them."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from stoker.backends.device import Device
from stoker.backends.llama.backend import load
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.smoke import smoke
from stoker.backends.llama.smoke.first_decode import nonsense_in
from stoker.backends.llama.smoke.smoke import SmokeSetting, try_in_child, verdict_for
from stoker.errors import LoadCrashedError, ModelFileError, ModelLoadError
from stoker.ipc.model import ModelSpec
from stoker.models.gguf.header import read_header
from stoker.native_crash import MAX_CHARS, native_text
from tiny_models import write_llama


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that llama.cpp runs."""
    return write_llama(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that trials were run with."""
    runs: list[str] = []
    run = smoke._run_trial

    def counted(path: Path, setting: SmokeSetting, *further: Any) -> Any:
        runs.append(str(setting))
        return run(path, setting, *further)

    monkeypatch.setattr(smoke, "_run_trial", counted)
    return runs


def remembered(folder: Path) -> list[Any]:
    """What the verdict file holds, without the keys."""
    return list(json.loads((folder / "smoke.json").read_text()).values())


def test_a_working_library_is_tried_once_and_remembered(
    model_path: Path, tmp_path: Path, trials: list[str]
) -> None:
    """SPEC R9: one trial for a build, a CPU and a kind of model; readable by its owner alone."""
    first = verdict_for(model_path, tmp_path)
    assert first.setting is SmokeSetting.OK
    assert first.label.startswith("llama.cpp · ")
    assert verdict_for(model_path, tmp_path) == first
    assert trials == ["ok"]
    assert stat.S_IMODE((tmp_path / "smoke.json").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["smoke.json"]


class NotWantedError(Exception):
    """Somebody changed their mind."""


def test_a_trial_that_nobody_wants_any_more_ends_with_its_child(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R4: a load can be stopped at any time; nothing is remembered of its trial."""
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "hang")
    children: list[Any] = []
    popen = smoke.subprocess.Popen

    def started(*args: Any, **kwargs: Any) -> Any:
        children.append(popen(*args, **kwargs))
        return children[-1]

    def give_up() -> None:
        raise NotWantedError

    monkeypatch.setattr(smoke.subprocess, "Popen", started)
    with pytest.raises(NotWantedError):
        smoke.verdict_of(smoke.read_header(model_path), tmp_path, give_up)
    assert [child.poll() for child in children] == [-9]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("crash", [("segv", "SIGSEGV"), ("nan", "fault")])
def test_a_crash_with_repacked_weights_leads_to_the_safe_setting(
    model_path: Path,
    tmp_path: Path,
    trials: list[str],
    monkeypatch: pytest.MonkeyPatch,
    crash: tuple[str, str],
) -> None:
    """SPEC R9: a miscompiled library is found in a child process, the safe setting used and remembered."""
    fault, reason = crash
    monkeypatch.setenv("STOKER_SMOKE_FAULT", fault)
    verdict = verdict_for(model_path, tmp_path)
    assert verdict.setting is SmokeSetting.NO_EXTRA_BUFTS
    assert reason in verdict.detail
    monkeypatch.delenv("STOKER_SMOKE_FAULT")
    with load(
        ModelSpec(id="m", path=str(model_path), n_ctx=256, num_threads=1), cache_dir=tmp_path
    ) as backend:
        assert backend.uses_extra_bufts is False
    assert trials == ["ok", "no_extra_bufts"]


def test_a_library_that_crashes_either_way_is_broken_and_tried_again(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: nothing is loaded where every setting crashes; the next start looks again."""
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv-always")
    with pytest.raises(ModelLoadError, match="SIGSEGV"):
        load(ModelSpec(id="m", path=str(model_path)), cache_dir=tmp_path)
    monkeypatch.delenv("STOKER_SMOKE_FAULT")
    assert verdict_for(model_path, tmp_path).setting is SmokeSetting.OK
    assert trials == ["ok", "no_extra_bufts", "ok"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b'{"k": 1}'])
def test_a_damaged_memory_is_ignored_and_written_anew(
    model_path: Path, tmp_path: Path, trials: list[str], content: bytes
) -> None:
    """SPEC R9: a corrupt file costs a trial, nothing else."""
    (tmp_path / "smoke.json").write_bytes(content)
    assert verdict_for(model_path, tmp_path).setting is SmokeSetting.OK
    assert trials == ["ok"]
    assert any(isinstance(entry, dict) and entry["setting"] == "ok" for entry in remembered(tmp_path))


def test_another_build_or_cpu_is_tried_for_itself(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: the verdict is of this build on this CPU."""
    verdict_for(model_path, tmp_path)
    monkeypatch.setattr(smoke, "cpu_identity", lambda: ("another",))
    verdict_for(model_path, tmp_path)
    monkeypatch.setattr(smoke, "LIBRARY_VERSION", "another")
    verdict_for(model_path, tmp_path)
    assert trials == ["ok", "ok", "ok"]
    assert len(remembered(tmp_path)) == 3


def test_a_memory_that_cannot_be_written_is_no_error(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC R9: without a cache folder each start tries anew."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert verdict_for(model_path, blocked / "cache").setting is SmokeSetting.OK
    assert "could not be kept" in caplog.text


def test_a_child_that_takes_too_long_is_no_lasting_verdict(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: slowness says something of the moment, not of the build."""
    monkeypatch.setattr(smoke, "TRIAL_TIMEOUT_S", 1e-3)
    verdict = verdict_for(model_path, tmp_path)
    assert verdict.setting is SmokeSetting.BROKEN
    assert not (tmp_path / "smoke.json").exists()


def test_a_file_that_is_no_model_is_not_tried(tmp_path: Path, trials: list[str]) -> None:
    """SPEC R1: the header is checked before any native code sees the file."""
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        verdict_for(foreign, tmp_path)
    assert trials == []


CARD = (Device("a card", "CUDA", "CUDA0"),)


def test_a_crash_with_an_accelerator_leads_to_the_cpu(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: tried without it, labelled and remembered so; with other devices it is tried anew."""
    monkeypatch.setattr(smoke, "accelerators", lambda: CARD)
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv-offload")
    verdict = verdict_for(model_path, tmp_path)
    assert verdict.setting is SmokeSetting.NO_OFFLOAD
    assert (verdict.setting.uses_extra_bufts, verdict.setting.offloads) == (True, False)
    assert verdict.label.startswith("llama.cpp · CPU")
    assert "SIGSEGV" in verdict.detail
    assert trials == ["ok", "no_extra_bufts", "no_offload"]
    assert verdict_for(model_path, tmp_path) == verdict
    with load(
        ModelSpec(id="m", path=str(model_path), n_ctx=256, num_threads=1), cache_dir=tmp_path
    ) as backend:
        assert backend.capabilities.computes_on_cpu
    assert len(trials) == 3
    monkeypatch.setattr(smoke, "accelerators", lambda: ())
    monkeypatch.delenv("STOKER_SMOKE_FAULT")
    assert verdict_for(model_path, tmp_path).setting is SmokeSetting.OK


def test_whatever_crashes_with_an_accelerator_and_repacked_is_tried_at_its_plainest(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: with neither, and where that crashes too it is a crash, not a refusal."""
    monkeypatch.setattr(smoke, "accelerators", lambda: CARD)
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv-always")
    verdict = verdict_for(model_path, tmp_path)
    assert (verdict.setting, verdict.has_crashed) == (SmokeSetting.BROKEN, True)
    assert trials == ["ok", "no_extra_bufts", "no_offload", "plain"]


def test_a_model_without_an_accelerator_uses_none(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC R9: none is in its label, whatever the machine has."""
    monkeypatch.setattr("stoker.backends.llama.model.accelerators", lambda: CARD)
    with closing(LlamaModel(ModelOptions(path=model_path, offloads=False))) as model:
        assert model.devices == ()


def test_a_file_that_crashes_is_refused_with_what_native_code_said(tmp_path: Path) -> None:
    """SPEC R9, L3: the message quotes it; nothing is remembered of the file or its kind."""
    bad = tiny_models.write_crashing_llama(tmp_path / "bad.gguf")
    with pytest.raises(LoadCrashedError, match=r"SIGABRT: .*GGML_ASSERT"):
        load(ModelSpec(id="m", path=str(bad)), cache_dir=tmp_path)
    assert not (tmp_path / "smoke.json").exists()


def test_a_suspect_is_tried_itself_and_remembered_by_its_file(
    tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9, L3: whatever is known of its kind; another file in its place is not what was tried."""
    path = tiny_models.write_llama(tmp_path / "m.gguf")
    other = tiny_models.write_llama(tmp_path / "other.gguf", seed=8)
    assert verdict_for(path, tmp_path).setting is SmokeSetting.OK
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv")
    try_in_child(ModelSpec(id="m", path=""), read_header(path), None, tmp_path)
    monkeypatch.delenv("STOKER_SMOKE_FAULT")
    assert trials == ["ok", "ok", "no_extra_bufts"]
    assert verdict_for(path, tmp_path).setting is SmokeSetting.NO_EXTRA_BUFTS
    assert verdict_for(other, tmp_path).setting is SmokeSetting.OK
    tiny_models.write_llama(path, seed=9, context=512)
    assert verdict_for(path, tmp_path).setting is SmokeSetting.OK
    assert len(trials) == 3


def test_files_that_are_remembered_by_themselves_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: the oldest is forgotten; what is known of kinds stays."""
    monkeypatch.setattr(smoke, "MAX_FILE_VERDICTS", 2)
    fine = smoke._Outcome(is_ok=True, is_refusal=False, is_telling=True, detail="", label="x")
    monkeypatch.setattr(smoke, "_run_trial", lambda *_: fine)
    headers = [read_header(tiny_models.write_llama(tmp_path / f"{n}.gguf", seed=n)) for n in range(4)]
    smoke.verdict_of(headers[0], tmp_path)
    for header in headers:
        smoke.verdict_of_file(header, tmp_path)
    known = json.loads((tmp_path / "smoke.json").read_text())
    assert [key.startswith("file:") for key in known] == [False, True, True]
    assert smoke._file_key(headers[3]) in known


def test_native_text_is_what_stands_before_the_dump_of_threads() -> None:
    """L3: its last lines and the dump's first, bounded; empty where nothing was said."""
    said = b"one\n\ntwo\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File x\n"
    assert native_text(said) == "one | two | Fatal Python error: Aborted"
    assert native_text(b"") == ""
    assert len(native_text(b"x" * 9999)) == MAX_CHARS
    assert native_text(b"".join(b"%d\n" % n for n in range(20))).split(" | ")[0] == "12"


def test_an_accelerator_is_tried_by_the_first_decode_of_the_engine(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: no second process holds the weights; that it went well is remembered, for the child too."""
    monkeypatch.setattr(smoke, "accelerators", lambda: CARD)
    spec = ModelSpec(id="m", path=str(model_path), n_ctx=256, num_threads=1)
    with load(spec, cache_dir=tmp_path) as backend:
        assert backend.length(0) == 0
        assert remembered(tmp_path) == [
            {"setting": "ok", "detail": "", "label": backend.capabilities.label, "has_crashed": False}
        ]
    assert verdict_for(model_path, tmp_path).setting is SmokeSetting.OK
    assert trials == []


def test_a_first_decode_without_numbers_asks_a_child_what_works(
    model_path: Path, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: the engine lives on, loads as the child found, and looks again."""
    monkeypatch.setattr(smoke, "accelerators", lambda: CARD)
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "nan")
    looked: list[str] = []

    def first(backend: Any) -> str:
        looked.append("" if looked else "logits that are not finite")
        return looked[-1]

    monkeypatch.setattr("stoker.backends.llama.backend.first_decode", first)
    spec = ModelSpec(id="m", path=str(model_path), n_ctx=256, num_threads=1)
    with load(spec, cache_dir=tmp_path) as backend:
        assert backend.uses_extra_bufts is False
    assert looked == ["logits that are not finite", ""]
    assert trials == ["ok", "no_extra_bufts"]


def test_a_model_that_gives_no_numbers_either_way_is_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9: nobody is served what is nonsense."""
    monkeypatch.setattr(smoke, "accelerators", lambda: CARD)
    monkeypatch.setattr("stoker.backends.llama.backend.first_decode", lambda _: "logits that are not finite")
    with pytest.raises(ModelLoadError, match="not finite"):
        load(ModelSpec(id="m", path=str(model_path), n_ctx=256, num_threads=1), cache_dir=tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told(value: float) -> None:
    """SPEC R9: of the batch, or of the token after it."""
    assert nonsense_in(lambda _: np.zeros((1, 8), np.float32), 8) == ""

    def wrong_at_last(plan: Any) -> Any:
        return np.full((1, 8), value if len(plan.items[0].tokens) == 1 else 0.0, np.float32)

    assert nonsense_in(wrong_at_last, 8) == "logits that are not finite after 1 tokens"
