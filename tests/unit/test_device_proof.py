"""What `stoker doctor` says of an accelerator's numbers beside the CPU's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tiny_models
from stoker.backends.device import Device
from stoker.backends.llama.smoke import compare
from stoker.backends.llama.smoke.compare import Likeness, compared, likeness_on
from stoker.cli.commands import doctor
from stoker.errors import LoadCrashedError, ModelLoadError
from stoker.ipc.model import NO_DEVICE, ModelClass, PlacementSpec

CARD = Device("NVIDIA H100", "CUDA", "CUDA0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that llama.cpp runs."""
    return tiny_models.write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def rows(seed: int = 0) -> np.ndarray:
    """Logits of 32 tokens of a vocabulary of 500."""
    return np.random.default_rng(seed).normal(0, 3, (32, 500)).astype(np.float32)


def test_the_same_computed_twice_is_alike(model: Path) -> None:
    """I17: tokens are chosen once, so that both are asked at the same places."""
    found = likeness_on(model, PlacementSpec(device=(NO_DEVICE,)))
    assert found == Likeness(compare.NUM_TOKENS, compare.NUM_TOKENS, 0.0)


def test_rounding_is_told_from_garbage() -> None:
    """I17: noise of a tenth of the spread is float; other rows, shifted ones and no numbers are not."""
    reference = rows()
    noisy = Likeness.of(reference, reference + rows(1) / 20)
    assert noisy.is_float_noise
    assert 0.04 < noisy.off < 0.06
    for wrong in (rows(2), np.roll(reference, 1, axis=0), np.zeros_like(reference)):
        assert not Likeness.of(reference, wrong).is_float_noise
    assert not Likeness.of(reference, np.full_like(reference, np.nan)).is_float_noise


def test_a_child_answers_for_a_device(model: Path) -> None:
    """I17: here for one that is not there, with the name that was asked for."""
    with pytest.raises(ModelLoadError, match=r"CUDA0.*there is no 'CUDA0' here"):
        compared(model, "CUDA0")


def test_a_child_that_dies_is_quoted(tmp_path: Path) -> None:
    """I17: what native code said before it crashed."""
    with pytest.raises(LoadCrashedError, match="GGML_ASSERT"):
        compared(tiny_models.write_crashing_llama(tmp_path / "bad.gguf"), NO_DEVICE)


@pytest.mark.parametrize(("off", "num_same", "level"), [(0.07, 31, "ok"), (1.9, 0, "broken")])
def test_doctor_says_how_many_tokens_a_device_has_as_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, off: float, num_same: int, level: str
) -> None:
    """I17: of the smallest model that generates; garbage has a remedy."""
    asked: list[tuple[Path, str]] = []

    def answer(path: Path, device: str) -> Likeness:
        asked.append((path, device))
        return Likeness(32, num_same, off)

    monkeypatch.setattr("stoker.backends.llama.binding.accelerators", lambda: (CARD,))
    monkeypatch.setattr(compare, "compared", answer)
    files = [
        SimpleNamespace(
            id=name, path=str(model), model_class=kind, header=SimpleNamespace(size_bytes=size), error=None
        )
        for name, kind, size in (
            ("large", ModelClass.DECODER, 9),
            ("small", ModelClass.DECODER, 5),
            ("vectors", ModelClass.ENCODER, 1),
        )
    ]
    (finding,) = doctor._proofs(files)
    assert (finding.subject, finding.level) == ("proof", level)
    assert f"CUDA0 CUDA NVIDIA H100: {num_same} of 32 tokens of small are the CPU's" in finding.text
    assert f"off by {off:.1%} of their spread" in finding.text
    assert bool(finding.remedy) is (level != "ok")
    assert asked == [(model, "CUDA0")]


def test_doctor_says_why_a_device_computes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the error is the finding; without accelerators there is none."""
    file = SimpleNamespace(
        id="m",
        path=str(model),
        model_class=ModelClass.DECODER,
        header=SimpleNamespace(size_bytes=1),
        error=None,
    )
    assert list(doctor._proofs([file])) == []
    monkeypatch.setattr("stoker.backends.llama.binding.accelerators", lambda: (CARD,))
    (finding,) = doctor._proofs([file])
    assert finding.level == "broken"
    assert "there is no 'CUDA0' here" in finding.text
