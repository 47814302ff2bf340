"""What `stoker doctor` says of backends, and `stoker plan` of who would serve a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stoker.backends import registry
from stoker.backends.registry import BackendEntry, entry_of
from stoker.backends.trial import trial
from stoker.backends.trial.trial import TrialVerdict
from stoker.cli.commands.plan import plan
from stoker.cli.doctor import backends as examined
from stoker.cli.doctor.finding import Finding, Level
from stoker.models.store import ModelFile, described
from stoker.settings import EngineSettings

LINE = BackendEntry("other", "other_backend.reader", suffixes=(".other",), needs=("json",), extra="other")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A model of a backend of which nothing is native; its trial is the test's."""
    monkeypatch.setattr(registry, "BACKENDS", (LINE, *registry.BACKENDS))
    monkeypatch.setattr(examined, "BACKENDS", registry.BACKENDS)
    fake = described("small", "fake:id=small")
    return ModelFile(id="small", path="small.other", size_bytes=1, description=fake.description)


def lines(findings: list[Finding], name: str) -> list[Finding]:
    """Those of one backend."""
    return [each for each in findings if each.text.startswith(name)]


def test_each_backend_is_shown_with_its_trial_or_the_extra_to_install(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K8: version, device and time of what computes; why not, where it does not; nothing tried twice."""
    settings = EngineSettings(cache_dir=tmp_path)
    tried = []
    verdicts = [TrialVerdict(is_ok=True, label="Other · Metal", token_s=0.002, took_s=1.5)]
    monkeypatch.setattr(trial, "_run", lambda *given: (tried.append(given), verdicts[-1])[1])
    for _ in range(2):
        (found,) = lines(list(examined.backends([model], settings)), "other (json")
        assert found.level is Level.OK
        assert "small decodes with Other · Metal" in found.text
        assert "a token 2.0 ms" in found.text
    assert len(tried) == 1
    verdicts.append(TrialVerdict(is_ok=False, detail="it died of SIGSEGV"))
    (_, found) = examined.self_test("other", [model], settings)  # tries it whatever is remembered
    assert (found.level, "does not decode: it died of SIGSEGV" in found.text) == (Level.WARNING, True)
    (found,) = lines(list(examined.backends([model], settings)), "other (json")
    assert "SIGSEGV" in found.text  # that is what is remembered now
    monkeypatch.setattr(
        examined, "BACKENDS", (BackendEntry("gone", "gone", needs=("no_lib",), extra="gone"),)
    )
    (found,) = examined.backends([model], settings)
    assert (found.level, found.remedy) == (Level.OK, "to have it: pip install 'stoker[gone]'")


def test_a_backend_that_examines_itself_is_heard_and_its_fault_is_a_finding(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K8: whatever a library raises on a machine that we have not seen."""
    package = tmp_path / "other_backend"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "self_test.py").write_text(
        "def self_test():\n    yield 'memory', True, '8 GiB'\n    raise OSError('no such queue')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    system, own, fault = examined.self_test("other", [], EngineSettings(cache_dir=tmp_path))
    assert "Python" in system.text
    assert (own.subject, own.text) == ("self-test", "memory: 8 GiB")
    assert (fault.level, "OSError: no such queue" in fault.text) == (Level.BROKEN, True)
    for name in ("other_backend", "other_backend.self_test"):
        sys.modules.pop(name, None)


def test_the_versions_of_libraries_and_the_kind_of_model_tell_trials_apart(model: ModelFile) -> None:
    """K8: another version is tried again."""
    assert set(trial.library_versions(LINE)) == {"json"}
    assert trial.library_versions(entry_of("mlx")).keys() == {"mlx", "mlx_lm"}


def test_plan_names_the_backend_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """K8: of a table with its twin, as an engine would begin with it."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    config = tmp_path / "stoker.toml"
    config.write_text(f'[models.m]\nfile = "{tmp_path}/gone.gguf"\nfallback = "fake:"\n')
    plan(model="m", as_json=True, config=config)
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["path"], found["fallbacks"]) == ("fake", "fake:", [])
    assert "gone.gguf" in found["backend_reason"]
    plan(model="m", config=config)
    assert "backend fake" in (shown := capsys.readouterr().out)
    assert "gone.gguf" in shown
