"""`stoker plan`: what it says of a model, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import TinyModel
from typer.testing import CliRunner

from seeing_folders import seeing_folder
from stoker.backends.device import Device, DeviceMemory
from stoker.backends.llama import binding
from stoker.backends.mlx.vision import families
from stoker.cli.app import app
from stoker.cli.commands import plan
from stoker.ipc.model import ModelSpec
from stoker.machine import limits, mapped
from stoker.machine.limits import MemoryLimits
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.wording import size_text
from tiny_models import write_moe
from tiny_projector import write_projector

MIB = 2**20
CELL_BYTES = 4096
N_CTX = 8192
SPEC = ModelSpec(id="m", path="m", n_ctx=N_CTX)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 4 KiB a cell: 32 MiB for the pool it was trained for."""
    changes = {f"llama.attention.{part}_length": np.uint32(256) for part in ("key", "value")}
    changes["llama.context_length"] = np.uint32(N_CTX)
    return TinyModel(changes=changes).write(tmp_path / "m.gguf")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the machine's memory, in bytes."""

    def set_memory(available: int, physical: int) -> None:
        def read(memory_limit: int | None = None, *, own_bytes: int = 0) -> MemoryLimits:
            free_bytes = available + limits.SERVER_BYTES - own_bytes  # so much is free beside a server
            return MemoryLimits(physical_bytes=physical, available_bytes=free_bytes, user_bytes=memory_limit)

        monkeypatch.setattr(limits, "read_limits", read)

    return set_memory


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def record(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and what is printed for programs."""
    code, output = run(*arguments, "--json")
    return code, json.loads(output)


def needed(path: Path, **changes: Any) -> int:
    """Bytes of the estimate."""
    return estimator_of(path)(ModelSpec(**{"id": "m", "path": "m", "n_ctx": N_CTX, **changes})).total_bytes


def test_a_model_with_room_fits(model: Path, machine: Any) -> None:
    """SPEC R2: lines, free, margin, limit and tier; exit code 0."""
    machine(6 * 2**30, 8 * 2**30)
    code, found = record(model, "--ctx-size", str(N_CTX))
    assert (code, found["verdict"], found["degraded"]) == (0, "fits", [])
    assert found["bytes"]["kv"] == N_CTX * CELL_BYTES
    assert found["total_bytes"] == sum(found["bytes"].values()) == needed(model)
    assert (found["free_bytes"], found["margin_bytes"], found["limit_bytes"]) == (
        6 * 2**30,
        512 * MIB,
        8 * 2**30,
    )
    assert (found["tier"], found["n_ctx"], found["slots"]) == ("high", N_CTX, 8)


def test_the_table_names_every_line_and_what_is_degraded(model: Path, machine: Any) -> None:
    """SPEC R2: for people the same numbers."""
    machine(needed(model) - 1, 8 * 2**30)
    code, output = run(model, "--ctx", str(N_CTX), "--margin", "0")
    assert code == 0
    for word in ("weights", "kv", "compute", "other", "total", "free", "margin", "limit", "tier", "high"):
        assert word in output
    assert "degraded" in output
    assert f"context {N_CTX // 2} instead of {N_CTX}" in output


def test_a_context_past_the_trained_one_is_told_with_the_number_that_was_typed(
    model: Path, machine: Any
) -> None:
    """SPEC R2: cells are allocated in blocks; a rounded number is none that anybody asked for."""
    machine(6 * 2**30, 8 * 2**30)
    _, output = run(model, "--ctx", "99999999")
    assert " instead of 99999999\n" in output
    assert f"trained on {N_CTX} tokens: one request gets no more" in output
    assert "trained on" not in run(model, "--ctx", str(N_CTX))[1]
    assert record(model, "--ctx", "99999999")[1]["n_ctx_train"] == N_CTX


def test_what_does_not_fit_now_exits_with_1_and_numbers(model: Path, machine: Any) -> None:
    """SPEC R1: refused with needed, free and margin, though the machine is large enough."""
    machine(600 * MIB - 512 * MIB // 8, 8 * 2**30)
    code, found = record(model, "--ctx", "2048", "--margin", "550MiB")
    assert (code, found["verdict"]) == (1, "insufficient")
    assert "536 MiB can be had now" in found["reason"]
    assert "550 MiB have to stay free" in found["reason"]


def test_what_never_fits_exits_with_1(model: Path, machine: Any) -> None:
    """SPEC R2: too_large, in the smallest form there is."""
    machine(6 * 2**30, 8 * 2**30)
    code, found = record(model, "--limit", "10MiB", "--margin", "0")
    assert (code, found["verdict"], found["limit_bytes"]) == (1, "too_large", 10 * MIB)
    assert (found["n_ctx"], found["kv_type"]) == (2048, "q8_0")
    code, output = run(model, "--limit", "10MiB", "--margin", "0")
    assert code == 1
    assert "too_large: it needs" in output
    assert "even with q8_0 cells" in output


def test_a_mixture_that_is_too_large_streams(tmp_path: Path, machine: Any, monkeypatch: Any) -> None:
    """SPEC R14: what a token reads, over what the disk gives; a disk that cannot be measured is told."""
    path = write_moe(tmp_path / "moe.gguf", num_layers=4, num_experts=16, width=512)
    whole = estimator_of(path)(ModelSpec(id="m", path=str(path), n_ctx=256, num_slots=1)).total_bytes
    machine(2**30, 2**30)
    options = (path, "--ctx", "256", "--slots", "1", "--margin", "0", "--device", "none", "--limit")
    monkeypatch.setattr(mapped, "read_speed", lambda _: 3.0 * MIB)
    code, found = record(*options, limits.SERVER_BYTES + whole * 9 // 10)
    experts = found["experts"]
    assert (code, found["verdict"]) == (0, "streams")
    assert (experts["bytes"], experts["active_bytes"]) == (12 * MIB, 12 * MIB * 2 // 16)
    assert experts["budget_bytes"] == found["bytes"]["experts"] < 12 * MIB
    left = 1 - experts["budget_bytes"] / experts["bytes"]
    assert experts["read_bytes_per_token"] == round(experts["active_bytes"] * left)
    assert experts["disk_tokens_per_s"] == round(3 * MIB / (experts["active_bytes"] * left), 2)
    monkeypatch.setattr(mapped, "read_speed", lambda _: 0.0)
    code, output = run(*options, limits.SERVER_BYTES + whole * 9 // 10)
    assert "streams: it loads, and reads experts from the disk as they are needed" in output
    assert "of experts from the disk, whose speed could not be measured" in output
    assert record(*options, limits.SERVER_BYTES + whole // 4)[1]["verdict"] == "too_large"


def test_options_change_what_is_planned(model: Path, machine: Any) -> None:
    """SPEC R2: context, slots, limit and margin."""
    machine(6 * 2**30, 8 * 2**30)
    code, found = record(model, "--ctx", "4096", "--slots", "2", "--limit", "4GiB", "--margin", "1GiB")
    assert code == 0
    assert (found["n_ctx"], found["slots"]) == (4096, 2)
    assert (found["limit_bytes"], found["margin_bytes"]) == (4 * 2**30, 2**30)
    assert found["total_bytes"] == needed(model, n_ctx=4096, num_slots=2)


def test_a_projector_is_planned_with_its_model(model: Path, machine: Any, tmp_path: Path) -> None:
    """SPEC R1, V1: its weights and buffers are a line of the estimate; another model's is refused."""
    machine(6 * 2**30, 8 * 2**30)
    own = write_projector(tmp_path / "p.gguf", n_embd=read_header(model).embedding_length)
    seeing = record(model, "--mmproj", own)[1]
    assert (seeing["pictures"], record(model)[1]["pictures"]) == ("ready", None)
    with_projector = seeing["bytes"]
    assert with_projector.pop("projector") > 8 * MIB
    assert with_projector == record(model)[1]["bytes"]
    foreign = write_projector(tmp_path / "f.gguf", n_embd=8)
    code, output = run(model, "--mmproj", foreign)
    assert code == 2
    assert "another model's" in output


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that has the build find accelerators of 80 GiB, with so much free on each."""

    def set_free(*free_bytes: int) -> None:
        found = tuple(
            Device("H100", "CUDA", f"CUDA{at}", index=at, read=partial(DeviceMemory, free, 80 * 2**30))
            for at, free in enumerate(free_bytes)
        )
        monkeypatch.setattr(binding, "accelerators", lambda: found)

    return set_free


def test_a_card_that_others_have_filled_is_left_aside(model: Path, machine: Any, cards: Any) -> None:
    """SPEC M9, R2: each device has its own budget; what lies where is told for each."""
    machine(6 * 2**30, 8 * 2**30)
    cards(600 * MIB, 40 * 2**30)
    code, found = record(model, "--ctx", str(N_CTX))
    assert (code, found["verdict"]) == (0, "fits")
    first, second = found["devices"]
    assert (first["id"], first["bytes"], first["free_bytes"]) == ("CUDA0", {}, 600 * MIB)
    assert (first["margin_bytes"], first["limit_bytes"]) == (512 * MIB, 80 * 2**30)
    assert second["bytes"]["kv"] == found["bytes"]["kv"]
    assert second["total_bytes"] == sum(second["bytes"].values()) < found["total_bytes"]
    header, *rows = run(model, "--ctx", str(N_CTX))[1].splitlines()[1:]
    assert header.split() == ["machine", "CUDA0", "CUDA1"]
    assert next(row for row in rows if row.startswith("kv")).split() == [
        "kv",
        *size_text(second["bytes"]["kv"]).split(),
    ]
    assert [row.split()[0] for row in rows if row.startswith(("total", "free"))] == ["total", "free"]


def test_what_no_card_can_hold_whole_is_planned_with_fewer_layers(
    model: Path, machine: Any, cards: Any
) -> None:
    """SPEC M9, R11: and refused, with exit code 1, where all of them were asked for."""
    machine(6 * 2**30, 8 * 2**30)
    whole = record(model, "--ctx", str(N_CTX))[1]["total_bytes"]
    cards(512 * MIB + whole // 2)
    code, output = run(model, "--ctx", str(N_CTX))
    assert code == 0
    assert "layers on CUDA0, the others on the CPU" in output
    cards(513 * MIB)
    code, output = run(model, "--ctx", str(N_CTX), "--gpu-layers", "all")
    assert (code, "insufficient" in output, "of CUDA0 at the least" in output) == (1, True, True)


def test_a_plan_without_devices_asks_no_library_for_them(model: Path, machine: Any, cards: Any) -> None:
    """SPEC M9: all in the machine's memory; a device that is not there is an error of the caller."""
    machine(6 * 2**30, 8 * 2**30)
    cards(40 * 2**30)
    assert record(model, "--device", "none")[1]["devices"] == []
    assert record(model, "--gpu-layers", "0")[1]["devices"] == []
    assert record(model, "--gpu-layers", "0")[1]["degraded"] == []
    code, output = run(model, "--device", "CUDA7")
    assert code == 2
    assert "there is no 'CUDA7' here; there are 0 CUDA0 (H100), none" in output


def test_a_plan_takes_every_setting_of_where_a_model_lies(model: Path, machine: Any, cards: Any) -> None:
    """SPEC R2, R11: what is asked of a load can be asked of a plan, and is refused in the same words."""
    machine(6 * 2**30, 8 * 2**30)
    cards(40 * 2**30, 50 * 2**30)
    whole = record(model)[1]["bytes"]["kv"]

    def cells(*flags: str, line: str = "kv") -> list[int]:
        return [each["bytes"].get(line, 0) for each in record(model, *flags)[1]["devices"]]

    assert cells("--kv-layout", "pool", "--main-gpu", "0")[1] == 0
    assert sum(cells("--no-kv-offload")) == 0
    assert sum(cells("--kv-type", "q8_0", "--slots", "2")) < sum(cells("--kv-type", "f16", "--slots", "2"))
    assert sum(cells("--kv-layout", "pool")) < whole == sum(cells("--kv-layout", "streams"))
    assert all(cells("--tensor-split", "1,1", line="weights"))
    for flags, text in {
        ("--tensor-split", "1,2,3"): "--tensor-split: 3 parts for 2 devices; there are 0 CUDA0 (H100)",
        ("--tensor-split", "3,x"): "--tensor-split: '3,x' are no proportions; write such as 3,1",
        ("--main-gpu", "4"): "--main-gpu: 4 is no index among 2 devices; there are 0 CUDA0 (H100)",
        ("--kv-type", "q5"): "--kv-type: 'q5' is none of 'f16', 'bf16', 'q8_0' or 'q4_0'",
        ("--split-mode", "column"): "--split-mode: 'column' is none of 'none', 'layer' or 'row'",
        ("--cpu-moe", "-1"): "--cpu-moe: '-1' is less than 0",
    }.items():
        code, output = run(model, *flags)
        assert (code, output.count("\n")) == (2, 1)
        assert text in output


def test_a_plan_tells_of_layers_that_there_is_no_device_for(model: Path, machine: Any, cards: Any) -> None:
    """SPEC R2, R11: as the load does."""
    machine(6 * 2**30, 8 * 2**30)
    cards()
    assert record(model)[1]["verdict"] == "fits"
    code, found = record(model, "--gpu-layers", "all")
    assert (code, found["verdict"]) == (0, "degraded")
    assert found["degraded"] == ["on the CPU: there is no device for its layers"]
    code, output = run(model, "--gpu-layers", "2")
    assert (code, "-> on the CPU: there is no device for its layers" in output) == (0, True)


def test_a_key_of_a_file_is_told_by_its_own_name_and_a_flag_by_its_own(model: Path, tmp_path: Path) -> None:
    """T2: a key of a file is no flag, though the command has one of that name."""
    config = tmp_path / "stoker.toml"
    config.write_text('gpu_layers = "most"\n', encoding="utf-8")
    wrong = "'most' is neither a number of layers nor auto or all\n"
    assert run(model, "--config", config) == (2, f"stoker: gpu_layers in {config}: {wrong}")
    assert run(model, "--gpu-layers", "most") == (2, f"stoker: --gpu-layers: {wrong}")


def test_more_layers_than_a_model_has_are_all_of_them(model: Path, machine: Any, cards: Any) -> None:
    """SPEC R11: the 99 that other programs are given; what is told is what there is."""
    machine(6 * 2**30, 8 * 2**30)
    cards(40 * 2**30)
    every = record(model)[1]["layers"]
    assert record(model, "--gpu-layers", "99")[1]["layers"] == every < 99
    assert f", {every} of {every} layers on CUDA0" in run(model, "--gpu-layers", "99")[1]


def test_the_tiers_own_limit_counts(model: Path, machine: Any) -> None:
    """SPEC M2, M5: a machine of 2 GiB gives models 1.5 GB."""
    machine(2**30, 2 * 2**30)
    _, found = record(model)
    assert (found["tier"], found["limit_bytes"]) == ("ultra_low", 1_500_000_000)


def test_a_broken_file_is_not_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """SPEC R7: exit code 2 and one line, as every command has it."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    code, output = run(path)
    assert code == 2
    assert output.startswith("stoker: ")


def test_no_native_library_is_loaded_where_no_device_is_asked_for(model: Path) -> None:
    """SPEC R2: without loading; also nothing that takes long to import."""
    code = (
        "import sys\nfrom stoker.cli.commands import plan\n"
        f"plan.plan(model={str(model)!r}, device=['none'], as_json=True)\n"
        "print([name for name in ('llama_cpp', 'numpy', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_verdict_has_its_words() -> None:
    """SPEC R2: what can be loaded is explained; the others come with numbers of their own."""
    assert set(plan._MEANINGS) == set(plan._COLOURS) == {"fits", "tight", "degraded", "streams"}


def test_a_plan_says_whether_the_model_sees(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10, V1: a folder's tower is in its sum; what another lacks is named."""
    machine(8 * 2**30, 16 * 2**30)
    monkeypatch.setattr(families, "installed_version", lambda: "0.7.10")
    path = seeing_folder(tmp_path / "m", "smolvlm")
    code, output = run(path)
    assert code == 0
    assert "pictures: ready" in output
    found = json.loads(run(path, "--json")[1])
    assert (found["pictures"], found["pictures_reason"]) == ("ready", None)
    assert found["bytes"]["projector"] > 0
    monkeypatch.setattr(families, "installed_version", lambda: "")
    assert "pictures: text_only: mlx-vlm is not installed" in run(path)[1]
    found = json.loads(run(path, "--json")[1])
    assert "projector" not in found["bytes"]
    assert found["pictures_reason"].startswith("mlx-vlm is not installed")


def test_the_limit_is_shown_whole_and_what_stoker_itself_takes_beside_it(model: Path, machine: Any) -> None:
    """SPEC R2: models have what is left of it, as where a server judges."""
    machine(6 * 2**30, 8 * 2**30)
    limit = limits.SERVER_BYTES + needed(model, n_ctx=2048) * 10 // 9 + 1
    options = (model, "--ctx", "2048", "--margin", "0", "--limit")
    code, found = record(*options, limit)
    assert (code, found["limit_bytes"], found["own_bytes"]) == (0, limit, limits.SERVER_BYTES)
    assert found["free_bytes"] == limit - limits.SERVER_BYTES
    assert record(*options, needed(model, n_ctx=512, num_slots=1))[1]["verdict"] == "too_large"
    _, output = run(*options, limits.SERVER_BYTES // 2)
    assert "Stoker itself takes 60 MiB, and 0 B have to stay free" in output
