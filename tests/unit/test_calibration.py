"""`stoker calibrate`: what its trials choose, what is remembered of it, and where that holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.cli.calibrate import measure as measuring
from stoker.cli.calibrate.measure import ModelLook, ModelTrials, dimensions
from stoker.cli.calibrate.search import Choices, Quickest, SettingsSearch, ToldTrial, TrialTime, TriedSetting
from stoker.cli.commands import doctor
from stoker.cli.exits import ExitCode
from stoker.client.models.specs import ModelSource
from stoker.errors import ModelLoadError, StokerError
from stoker.models import calibration
from stoker.models.calibration import MAX_RECORDS, Calibration, Calibrations
from stoker.models.store import ModelStore
from stoker.models.trials import TRIALS_FILE
from stoker.settings import EngineSettings
from tiny_models import write_llama

THREADS = TriedSetting("threads", (1, 8))
LOOK = ModelLook(num_threads=4, has_device=False, expert_budget=0)


class Machine:
    """Where trials take made up times.

    Attributes:
        tried: the settings of each trial, in order.
    """

    def __init__(self, seconds: Callable[[Choices, int], float]) -> None:
        self._seconds = seconds
        self.tried: list[Choices] = []
        self.told: list[ToldTrial] = []

    async def measure(self, choices: Choices) -> TrialTime:
        """One trial."""
        self.tried.append(choices)
        return TrialTime(self._seconds(choices, len(self.tried)), 30.0)

    async def search(self, *dimensions: TriedSetting) -> Quickest:
        """All trials of these settings."""
        return await SettingsSearch(dimensions, self.measure, self.told.append).run()


async def test_what_is_quicker_is_chosen_one_setting_after_the_other() -> None:
    """SPEC R16: the second setting is tried with what the first gave; at the end all against the defaults."""

    def seconds(choices: Choices, _: int) -> float:
        return 1.0 - 0.3 * (choices.get("threads") == 8) - 0.2 * (choices.get("speculation") == "off")

    machine = Machine(seconds)
    found = await machine.search(THREADS, TriedSetting("speculation", ("off",)))
    assert found.settings == {"threads": 8, "speculation": "off"}
    assert (found.default.seconds, found.best.seconds) == (1.0, pytest.approx(0.5))
    assert {"threads": 8, "speculation": "off"} in machine.tried
    assert {"speculation": "off"} not in machine.tried
    assert [trial.number for trial in machine.told] == list(range(1, len(machine.tried) + 1))
    assert machine.told[-1].number <= machine.told[-1].most


async def test_what_is_within_the_noise_changes_nothing() -> None:
    """SPEC R16: a gain of two percent, or one less than trials of the same value differ by."""
    assert (await Machine(lambda choices, _: 0.98 if choices else 1.0).search(THREADS)).settings == {}
    times = iter((1.0, 0.9, 0.9, 0.9, 0.9, 1.2, 1.2, 1.0, 0.9, *[1.0] * 9))
    assert (await Machine(lambda _, __: next(times)).search(THREADS)).settings == {}


async def test_a_machine_that_gets_slower_decides_nothing() -> None:
    """SPEC R16: each trial takes longer than the last; values take turns, every other round in reverse."""
    machine = Machine(lambda _, number: 1.0 + number / 10)
    assert (await machine.search(THREADS)).settings == {}
    first = [choices.get("threads") for choices in machine.tried[:6]]
    assert first[:3] == [None, 1, 8]
    assert first[3:] == [8, 1, None]


async def test_a_chance_hit_is_found_out_at_the_end() -> None:
    """SPEC R16: what was chosen stands once more against the defaults, and has to be quicker again."""
    machine = Machine(lambda choices, number: 0.5 if choices and number <= 9 else 1.0)
    found = await machine.search(THREADS)
    assert len(machine.tried) == 15
    assert (found.settings, found.best) == ({}, found.default)


async def test_what_cannot_be_loaded_or_is_hopeless_is_not_tried_again() -> None:
    """SPEC R16: the reason is told; without the defaults there is nothing to compare with."""

    def seconds(choices: Choices, _: int) -> float:
        if choices.get("threads") == 8:
            raise ModelLoadError("it did not load")
        return 5.0 if choices else 1.0

    machine = Machine(seconds)
    found = await machine.search(THREADS)
    assert found.refused == {"threads 8": "it did not load"}
    assert [choices.get("threads") for choices in machine.tried[:5]] == [None, 1, 8, None, None]

    def broken(_: Choices, __: int) -> float:
        raise ModelLoadError("not even so")

    with pytest.raises(StokerError, match="not even so"):
        await Machine(broken).search(THREADS)


def test_what_makes_no_difference_or_is_set_is_not_tried() -> None:
    """SPEC R16: threads beside a device, layers without one, experts all in memory, what is given."""
    names = [each.name for each in dimensions(LOOK, {"n_batch", "ctx_size"})]
    assert names == ["threads", "kv_type", "speculation"]
    beside = ModelLook(num_threads=2, has_device=True, expert_budget=2**20)
    found = {each.name: each.values for each in dimensions(beside, ())}
    assert (found["gpu_layers"], found["expert_budget"]) == ((0,), (2**19,))
    assert "threads" not in found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model in the folder of models."""
    return write_llama(tmp_path / "models" / "tiny.gguf")


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> EngineSettings:
    """With folders of their own."""
    folders = {name: tmp_path / name for name in ("cache_dir", "run_dir")}
    return EngineSettings(models=(str(model),), models_dir=model.parent, **folders)


def record(path: Path, **values: Any) -> Calibration:
    """Something that was found."""
    times = {"default_s": 2.0, "best_s": 1.5, "default_tokens_per_s": 10.0, "best_tokens_per_s": 15.0}
    return Calibration(path=str(path), settings=values, **times)


def fingerprint(settings: EngineSettings) -> str:
    """Of the model."""
    from stoker.backends.registry import open_model  # noqa: PLC0415 - of one function here

    return open_model(settings.models[0]).fingerprint


def test_it_holds_for_the_same_file_build_and_machine(
    settings: EngineSettings, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R16: in the file of all trials, beside what others have found."""
    kept = Calibrations(settings.cache_dir)
    settings.cache_dir.mkdir()
    (settings.cache_dir / TRIALS_FILE).write_text('{"other": {"setting": "ok"}}')
    kept.keep(record(model, threads=3), fingerprint(settings))
    found = kept.find(str(model), fingerprint(settings))
    assert found is not None
    assert (found.settings, found.gain) == ({"threads": 3}, 0.25)
    for name in ("_build", "_machine"):
        with monkeypatch.context() as changed:
            changed.setattr(calibration, name, lambda: ("another",))
            assert kept.find(str(model), fingerprint(settings)) is None
    assert kept.find(str(model), "another file") is None
    assert kept.is_outdated(str(model))
    assert kept.forget(str(model))
    assert not kept.forget(str(model))
    assert json.loads((settings.cache_dir / TRIALS_FILE).read_text()) == {"other": {"setting": "ok"}}
    for number in range(MAX_RECORDS + 3):
        kept.keep(record(Path(f"/{number}"), threads=number), "x")
    assert kept.find("/2", "x") is None
    assert kept.find("/3", "x") is not None


def test_what_was_found_is_the_default_and_a_setting_wins(settings: EngineSettings, model: Path) -> None:
    """SPEC R16, C21: of all models or of one; `calibrated = false` leaves it out; doctor says what holds."""
    found = record(model, threads=3, kv_type="q8_0", n_batch=64)
    Calibrations(settings.cache_dir).keep(found, fingerprint(settings))

    def spec_of(**changes: Any) -> tuple[int, str, int]:
        spec = ModelSource.read(settings.replace(**changes)).served[0].spec
        return spec.num_threads, spec.kv_type, spec.n_batch

    assert spec_of() == (3, "q8_0", 64)
    assert spec_of(threads=2) == (2, "q8_0", 64)
    assert spec_of(placement={"tiny": {"kv_type": "f16"}}) == (3, "f16", 64)
    assert spec_of(flash_attention="off") == (3, "", 64)  # which quantised cells need
    assert spec_of(placement={"tiny": {"flash_attention": "off"}}) == (3, "", 64)
    off_but_here = {"flash_attention": "off", "placement": {"tiny": {"flash_attention": "auto"}}}
    assert spec_of(**off_but_here) == (3, "q8_0", 64)
    assert spec_of(calibrated=False) == (0, "", 0)
    usable = ModelStore(settings.models_dir).list()
    (finding,) = (each for each in doctor._calibrations(usable, settings.replace(threads=2)))
    assert finding.text == (
        "tiny: calibrated: kv_type q8_0, n_batch 64, 25% less time in its trials;"
        " calibrated threads 3 does not hold: threads is set"
    )
    (finding,) = (each for each in doctor._calibrations(usable, settings.replace(flash_attention="off")))
    assert "calibrated kv_type q8_0 does not hold: flash_attention is off" in finding.text
    model.write_bytes(model.read_bytes() + b"\0" * 64)
    assert spec_of() == (0, "", 0)
    (finding,) = (each for each in doctor._calibrations(usable, settings))
    assert "does not hold any more: stoker calibrate tiny" in finding.text


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Trials in which three threads are quickest, and nothing is loaded."""
    machine = Machine(lambda choices, _: 0.5 if choices.get("threads") == 3 else 1.0)

    async def look(_: ModelTrials) -> ModelLook:
        return LOOK

    async def measure(_: ModelTrials, choices: Choices) -> TrialTime:
        return await machine.measure(choices)

    monkeypatch.setattr(ModelTrials, "look", look)
    monkeypatch.setattr(ModelTrials, "measure", measure)
    monkeypatch.setattr(measuring.psutil, "cpu_count", lambda: 4)
    return machine


def run(settings: EngineSettings, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    names = ("cache_dir", "run_dir", "models_dir")
    folders = {f"STOKER_{name.upper()}": str(getattr(settings, name)) for name in names}
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **folders})
    return result.exit_code, result.stdout


def test_the_command_keeps_what_is_quickest_until_it_is_to_forget_it(
    settings: EngineSettings, trials: Machine
) -> None:
    """SPEC R16: JSON for programs; `plan` shows it; what is not known to be calibrated is refused."""
    code, output = run(settings, "calibrate", "tiny", "--only", "threads", "--json")
    found = json.loads(output)
    assert (code, found["settings"], found["gain"], found["tried"]) == (0, {"threads": 3}, 0.5, ["threads"])
    code, output = run(settings, "plan", "tiny", "--device", "none", "--json")
    assert json.loads(output)["calibration"] == ["calibrated: threads 3, 50% less time in its trials"]
    code, output = run(settings, "calibrate", "tiny", "--only", "speculation")
    assert "nothing is quicker than the defaults (1.00 s) by more than the noise" in output
    assert run(settings, "calibrate", "tiny", "--forget")[1] == "tiny: forgotten, the defaults hold\n"
    assert run(settings, "calibrate", "tiny", "--forget")[1] == "tiny: nothing was found for it before\n"
    assert run(settings, "calibrate", "tiny", "--only", "port")[0] == ExitCode.FAULT


def test_a_command_that_is_interrupted_leaves_what_was_known(
    settings: EngineSettings, model: Path, trials: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R16: Ctrl-C at any trial changes nothing; so does what cannot be loaded."""
    Calibrations(settings.cache_dir).keep(record(model, threads=3), fingerprint(settings))
    before = (settings.cache_dir / TRIALS_FILE).read_bytes()

    async def interrupted(_: ModelTrials, choices: Choices) -> TrialTime:
        await trials.measure(choices)
        if len(trials.tried) == 4:
            raise KeyboardInterrupt
        return TrialTime(1.0, 1.0)

    monkeypatch.setattr(ModelTrials, "measure", interrupted)
    assert run(settings, "calibrate", "tiny")[0] == ExitCode.INTERRUPTED
    assert len(trials.tried) == 4
    assert (settings.cache_dir / TRIALS_FILE).read_bytes() == before


async def test_a_trial_asks_a_model_in_an_engine_of_its_own(settings: EngineSettings, tmp_path: Path) -> None:
    """SPEC R16: with the settings of the trial, and without what an earlier calibration found."""
    Calibrations(settings.cache_dir).keep(record(Path(settings.models[0]), threads=3), fingerprint(settings))
    trials = ModelTrials(settings.replace(device=("none",), ctx_size=2048, slots=1), tmp_path / "run")
    look = await trials.look()
    assert look.num_threads != 3
    assert not look.has_device
    found = await trials.measure({"threads": 1, "speculation": "off"})
    assert found.seconds > 0
    assert found.tokens_per_s > 0
    with pytest.raises(StokerError):
        await trials.measure({"n_batch": 10**9})
