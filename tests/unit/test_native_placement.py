"""A placement as llama.cpp gets it: the CPU stands for devices, which this build loads models onto."""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stoker.backends.device import CPU, Device, DeviceMemory
from stoker.backends.llama import backend, model, placement
from stoker.backends.llama.backend import load
from stoker.backends.llama.binding import llama, start
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.draft import open_draft
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.smoke import smoke
from stoker.errors import InvalidRequestError
from stoker.ipc.model import ModelSpec, PlacementSpec, SplitMode
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate import shares
from stoker.models.memory_estimate.placing import draft_placement
from stoker.models.placement import chosen_devices, with_device_ids
from tiny_models import write_llama

CARDS = tuple(
    Device(name, "CUDA", id=f"CUDA{at}", index=at, read=lambda: DeviceMemory(2**30, 2**30))
    for at, name in enumerate(("NVIDIA A", "NVIDIA A", "NVIDIA B"))
)


def cpu_device() -> int:
    """The library's own pointer to the CPU, which may stand in a list of devices."""
    start()
    function = llama._lib.ggml_backend_dev_by_type
    function.restype = ctypes.c_void_p
    return int(function(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers."""
    return write_llama(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What models were loaded with, on a machine whose three cards are its CPU."""
    seen: list[Any] = []
    native_load = llama.llama_model_load_from_file

    def loaded(file: bytes, given: Any) -> Any:
        seen.append(given)
        return native_load(file, given)

    monkeypatch.setattr(llama, "llama_model_load_from_file", loaded)
    monkeypatch.setattr(model, "accelerators", lambda: CARDS)
    monkeypatch.setattr(placement, "native_device", lambda _: cpu_device())
    return seen


def pointers(given: Any) -> list[int]:
    """Of the devices of the parameters, up to the null at their end."""
    found = ctypes.cast(given.devices, ctypes.POINTER(ctypes.c_void_p))
    return [found[at] for at in range(next(at for at in range(9) if not found[at]))]


def test_every_part_of_a_placement_reaches_llama_cpp(path: Path, params: list[Any]) -> None:
    """SPEC R11: layers, devices, how they share it, parts, experts, how the file is read."""
    asked = PlacementSpec(
        gpu_layers=2,
        device=("CUDA2", "0"),
        split_mode=SplitMode.LAYER,
        tensor_split=(3 * 2**40, 2**40),
        cpu_moe=2,
        mmap=False,
    )
    with closing(LlamaModel(ModelOptions(path=path, placement=asked))) as loaded:
        assert [device.id for device in loaded.devices] == ["CUDA2", "CUDA0"]
    (given,) = params
    assert (given.n_gpu_layers, given.split_mode, given.load_mode) == (2, 1, 0)
    assert pointers(given) == [cpu_device()] * 2
    assert [given.tensor_split[at] for at in range(3)] == [0.75, 0.25, 0.0]
    override = ctypes.cast(given.tensor_buft_overrides, ctypes.POINTER(placement._BufferOverride))
    assert override[0].pattern == rb"blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    assert override[0].buffer_type
    assert override[1].pattern is None


def test_wherever_it_fits_is_all_layers_and_no_device_is_none(path: Path, params: list[Any]) -> None:
    """SPEC R11: "auto" that nobody has weighed leaves nothing behind; "none" leaves everything."""
    for asked in (PlacementSpec(), PlacementSpec(device=("none",)), PlacementSpec(gpu_layers=0)):
        LlamaModel(ModelOptions(path=path, placement=asked)).close()
    LlamaModel(ModelOptions(path=path, offloads=False)).close()
    whole, *others = params
    assert (whole.n_gpu_layers, len(pointers(whole)), whole.load_mode) == (-1, 3, -1)
    assert not whole.tensor_split
    assert not whole.tensor_buft_overrides
    assert [(given.n_gpu_layers, pointers(given)) for given in others] == [(0, [])] * 3


def tied_override(given: Any) -> tuple[bytes, int] | None:
    """The tensor that was put elsewhere, and into what memory; None: there is none."""
    if not given.tensor_buft_overrides:
        return None
    override = ctypes.cast(given.tensor_buft_overrides, ctypes.POINTER(placement._BufferOverride))
    assert override[1].pattern is None
    return override[0].pattern, override[0].buffer_type


@pytest.mark.parametrize(
    ("place", "index"),
    [
        ({"device": ("CUDA2",)}, 2),
        ({"device": ("CUDA0", "CUDA1"), "split_mode": SplitMode.NONE, "main_gpu": 1}, 1),
        ({"device": ("CUDA0", "CUDA1"), "split_mode": SplitMode.LAYER, "tensor_split": (0.0, 1.0)}, 1),
        ({"device": ("CUDA0", "CUDA1"), "split_mode": SplitMode.LAYER}, None),
        ({"device": ("CUDA0",), "gpu_layers": 1}, None),
        ({"device": ("none",)}, None),
    ],
)
def test_tied_embeddings_go_to_the_device_that_has_all_else(
    tmp_path: Path,
    params: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    place: dict[str, Any],
    index: int | None,
) -> None:
    """SPEC R11: that one and no other; in every load of the file, as it is tried, compared and served."""
    asked_for: list[int] = []
    own = placement._buffer_type_of(CARDS[0])
    monkeypatch.setattr(placement, "_buffer_type_of", lambda device: asked_for.append(device.index) or own)
    file = write_llama(tmp_path / "tied.gguf", is_tied=True)
    asked = PlacementSpec(**place)
    LlamaModel(ModelOptions(path=file, placement=asked)).close()
    spec = ModelSpec(id="m", path=str(file), n_ctx=256, placement=asked)
    backend._put_together(spec, read_header(file), ModelOptions(path=file, placement=asked)).close()
    expected = None if index is None else (rb"^token_embd\.weight$", own)
    assert [tied_override(given) for given in params] == [expected] * 2
    assert asked_for == ([] if index is None else [index] * 2)


def test_embeddings_of_their_own_stay_in_host_memory(path: Path, params: list[Any]) -> None:
    """SPEC R11: the device would need room for them."""
    LlamaModel(ModelOptions(path=path, placement=PlacementSpec(device=("CUDA0",)))).close()
    assert tied_override(params[0]) is None


def test_a_draft_model_lies_as_it_is_estimated(tmp_path: Path, params: list[Any]) -> None:
    """SPEC R1, D9: tied embeddings on the device alone."""
    file = write_llama(tmp_path / "tied.gguf", is_tied=True)
    asked = PlacementSpec(device=("CUDA1",))
    with closing(LlamaModel(ModelOptions(path=file, placement=asked))) as target:
        open_draft(str(file), target, 256, 1).close()
    assert shares.device_of_tied(shares.read_parts(read_header(file)), draft_placement(asked)) == "CUDA1"
    assert all(tied_override(given) for given in params)


@pytest.mark.usefixtures("params")
@pytest.mark.parametrize(
    ("place", "num_threads", "are_few"),
    [
        ({}, 0, True),
        ({"gpu_layers": "all"}, 0, True),
        ({"gpu_layers": 3}, 0, True),
        ({"gpu_layers": 2}, 0, False),
        ({"kv_offload": False}, 0, False),
        ({"cpu_moe": 1}, 0, False),
        ({"device": ("none",)}, 0, False),
        ({}, 7, False),
    ],
)
def test_threads_beside_a_device_that_computes_all_are_few(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any], num_threads: int, *, are_few: bool
) -> None:
    """SPEC R11: others spin on cores that launch kernels; whatever layer is the CPU's has every core."""
    monkeypatch.setattr(backend, "num_physical_cores", lambda: 7)
    placement_ = PlacementSpec(**place)
    spec = ModelSpec(id="m", path=str(path), num_threads=num_threads, placement=placement_)
    with closing(LlamaModel(ModelOptions(path=path, placement=placement_))) as loaded:
        expected = backend.THREADS_BESIDE_DEVICES if are_few else 7
        assert backend._num_threads(spec, loaded) == expected


def test_cells_lie_in_host_memory_where_that_was_asked_for(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R11: `kv_offload`, and the type of the cells."""
    seen: list[tuple[Any, ...]] = []
    native_params = ContextOptions.native_params

    def noted(options: ContextOptions) -> Any:
        given: Any = native_params(options)
        seen.append((given.offload_kqv, given.type_k))
        return given

    monkeypatch.setattr(ContextOptions, "native_params", noted)
    spec = ModelSpec(id="m", path=str(path), n_ctx=256, kv_type="f16")
    load(spec, cache_dir=tmp_path).close()
    in_host = ModelSpec(id="m", path=str(path), n_ctx=256, placement=PlacementSpec(kv_offload=False))
    load(in_host, cache_dir=tmp_path).close()
    assert seen == [(True, 1), (False, 30)]


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({}, ("CUDA0", "CUDA1", "CUDA2")),
        ({"device": ("1",)}, ("CUDA1",)),
        ({"device": ("cuda2", "CUDA0")}, ("CUDA2", "CUDA0")),
        ({"device": ("NVIDIA B",)}, ("CUDA2",)),
        ({"device": ("none",)}, ("none",)),
        ({"gpu_layers": 0}, ("none",)),
    ],
)
def test_a_device_has_an_index_an_id_and_a_name(asked: dict[str, Any], ids: tuple[str, ...]) -> None:
    """SPEC R11: as `doctor` shows them; the CPU is none of them."""
    spec = ModelSpec(id="m", path="m", placement=PlacementSpec(**asked))
    assert with_device_ids(spec, (*CARDS, CPU)).placement.device == ids


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"device": ("CUDA7",)}, "device: there is no 'CUDA7' here; there are 0 CUDA0 (NVIDIA A), 1 CUDA1"),
        ({"device": ("3",)}, "device: there is no '3' here"),
        ({"device": ("nvidia a",)}, "device: several are called 'nvidia a'"),
        ({"device": ("0", "CUDA0")}, "device: one is named twice: 0, CUDA0"),
        ({"main_gpu": 3}, "main_gpu: 3 is no index among 3 devices"),
        ({"tensor_split": (1.0, 1.0)}, "tensor_split: 2 parts for 3 devices"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(asked: dict[str, Any], text: str) -> None:
    """SPEC R11: a typed error, which names the field."""
    with pytest.raises(InvalidRequestError) as caught:
        chosen_devices(PlacementSpec(**asked), CARDS)
    assert caught.value.message.startswith(text)
    assert caught.value.param == text.partition(":")[0]
    assert caught.value.details["devices"] == ["CUDA0", "CUDA1", "CUDA2"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"split_mode": SplitMode.LAYER, "main_gpu": 1}, "main_gpu"),
        ({"split_mode": SplitMode.NONE, "tensor_split": (1.0, 1.0, 2.0)}, "tensor_split"),
        ({"main_gpu": 1, "tensor_split": (1.0, 1.0, 2.0)}, "tensor_split"),
    ],
)
def test_what_would_be_ignored_for_another_setting_is_refused(asked: dict[str, Any], param: str) -> None:
    """SPEC R11: where there are several devices; with one there is nothing to share."""
    spec = ModelSpec(id="m", path="m.gguf", placement=PlacementSpec(**asked))
    with pytest.raises(InvalidRequestError, match=rf"^{param}: with \w+ .*; leave out one of the two"):
        with_device_ids(spec, CARDS)
    alone = PlacementSpec(**asked | {"device": ("CUDA2",), "main_gpu": 0})
    one = ModelSpec(id="m", path="m.gguf", placement=alone)
    assert with_device_ids(one, CARDS).placement.device == ("CUDA2",)


def test_a_machine_without_devices_says_so() -> None:
    """SPEC R11: what is asked for by name has to be there."""
    with pytest.raises(
        InvalidRequestError, match=r"there is no 'CUDA0' here; there is the CPU alone \(none\)"
    ):
        chosen_devices(PlacementSpec(device=("CUDA0",)), (CPU,))
    assert chosen_devices(PlacementSpec(gpu_layers="all"), (CPU,)) == ()


def test_what_a_placement_costs_is_measured_once_and_remembered(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R11: where layers stay in host memory beside a device; for this file and placement."""
    measured: list[Any] = []

    def tried(*given: Any) -> smoke._Outcome:
        measured.append(given[4] if len(given) > 4 else ())
        return smoke._Outcome(is_ok=True, is_refusal=False, is_telling=True, detail="", token_s=0.02)

    monkeypatch.setattr(smoke, "accelerators", lambda: CARDS)
    monkeypatch.setattr(smoke, "_run_trial", tried)

    def cost(count: int) -> float:
        placement = PlacementSpec(device=("CUDA0",), gpu_layers=count)
        spec = ModelSpec(id="m", path=str(path), placement=placement)
        return smoke.tried_options(spec, read_header(path), None, tmp_path).token_s

    assert [cost(2), cost(2), cost(1), cost(3)] == [0.02, 0.02, 0.02, 0.0]
    assert measured == [(), smoke.TOKEN_TIME, smoke.TOKEN_TIME]
