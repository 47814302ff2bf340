"""Who serves a model: by its files, what is installed, what a trial has found; else its twin (adr 32)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.backends import registry
from stoker.backends.registry import BackendEntry
from stoker.client.models.specs import ModelSource
from stoker.client.models.ways import ways_of
from stoker.errors import (
    BackendUnavailableError,
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedError,
)
from stoker.runtime import Runtime
from stoker.settings import EngineSettings
from tiny_models import write_llama

TWIN = "fake:id=twin,eog_period=0"
BAD = "fake:load_fails=1"


def entry(module: str = "hello_backend", *, needs: tuple[str, ...] = ()) -> BackendEntry:
    """A backend beside those that there are, which reads folders."""
    return BackendEntry("hello", module, folder_files=("hello.bin",), needs=needs, extra="hello", rank=-1)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a backend."""
    return lambda one: monkeypatch.setattr(registry, "BACKENDS", (one, *registry.BACKENDS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of the backend "hello"."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "hello.bin").touch()
    return path


def settings_of(tmp_path: Path, table: dict[str, Any], **fields: Any) -> EngineSettings:
    """One model, "m", of an engine in this process."""
    folders = {
        "cache_dir": tmp_path / "cache",
        "models_dir": tmp_path / "models",
        "run_dir": tmp_path / "run",
    }
    return EngineSettings(model_tables={"m": table}, isolation="thread", **folders, **fields)


async def text_of(runtime: Runtime, prompt: str = "Say: ", **fields: Any) -> str:
    """One greedy answer."""
    deltas = runtime.generate(prompt, temperature=0.0, max_tokens=5, **fields)
    return "".join([delta.text async for delta in deltas])


# ---------------------------------------------------------------- by what the files are


def test_a_folder_with_a_twin_has_both_ways_and_a_named_backend_one(add: Any, folder: Path) -> None:
    """K8: the preferred one first; a backend that does not read the model is refused, not replaced."""
    add(entry())
    assert [way.entry.name for way in ways_of(str(folder))] == ["hello"]
    twin = write_llama(folder / "twin.gguf")
    assert [(way.entry.name, way.path) for way in ways_of(str(folder))] == [
        ("hello", str(folder)),
        ("llama", str(twin)),
    ]
    assert [way.path for way in ways_of(str(folder), "llama")] == [str(twin)]
    with pytest.raises(UnsupportedError, match=r"mnn does not read .*: hello, llama"):
        ways_of(str(folder), "mnn")
    with pytest.raises(
        InvalidRequestError, match=r"there is no 'mxl'; there are: auto, hello, mnn, mlx, llama$"
    ):
        ways_of(str(folder), "mxl")
    write_llama(folder / "other.gguf")  # which of them would be meant
    assert len(ways_of(str(folder))) == 1


def test_apple_s_own_processors_prefer_mlx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """K8: elsewhere llama.cpp is the quicker one of both."""
    (tmp_path / "model.safetensors").touch()
    write_llama(tmp_path / "twin.gguf")
    for is_apple, first in ((False, "llama"), (True, "mlx")):
        monkeypatch.setattr(registry, "_IS_APPLE", is_apple)
        assert ways_of(str(tmp_path))[0].entry.name == first


async def test_the_status_names_each_of_the_backends_that_compute(
    add: Any, folder: Path, tmp_path: Path
) -> None:
    """K8: of the models in memory, each once; while none is there, that of the default."""
    add(entry())
    models = ("fake:id=a,device=one", "fake:id=b,device=two", str(folder), "fake:id=c,device=one")
    folders = {"cache_dir": tmp_path / "cache", "run_dir": tmp_path / "run"}
    async with Runtime(models=models, isolation="thread", device_lease=False, **folders) as runtime:
        assert (await runtime.status()).label == "fake · one, fake · two, hello · CPU"
        for model in ("a", "b", "c"):
            await runtime.unload_model(model)
        assert (await runtime.status()).label == "hello · CPU"
        await runtime.unload_model("model")
        assert (await runtime.status()).label == "fake · one"


# ---------------------------------------------------------------- by what the machine has


async def test_what_is_not_installed_gives_way_to_the_twin_and_says_so(
    add: Any, folder: Path, tmp_path: Path
) -> None:
    """K8: the reason names the extra, wherever the model tells of itself; all it says is the twin's."""
    add(entry(needs=("no_such_library",)))
    table = {"file": str(folder), "fallback": f"{TWIN},script={script(tmp_path)}", "load": True}
    async with Runtime(settings=settings_of(tmp_path, table)) as runtime:
        (model,) = runtime.models
        assert (model.backend, model.path, model.architecture) == ("fake", table["fallback"], "fake")
        assert "a model that reasons" in model.chat_template
        assert "no_such_library is not installed" in model.backend_reason
        assert "pip install 'stoker[hello]'" in model.backend_reason
        (state,) = runtime.model_states()
        assert (state.state, state.reason) == ("ready", model.backend_reason)
    with pytest.raises(BackendUnavailableError, match=r"stoker\[hello\]"):
        ModelSource.read(settings_of(tmp_path, table, backend="hello"))
    with pytest.raises(BackendUnavailableError, match=r"stoker\[hello\]"):
        ModelSource.read(settings_of(tmp_path, {"file": str(folder)}))


def test_a_file_that_is_not_there_or_not_whole_gives_way_to_the_twin(tmp_path: Path) -> None:
    """K8: the reason names the file; without a twin that is the refusal."""
    whole = write_llama(tmp_path / "whole.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole.read_bytes()[:-100])
    for file in (broken, tmp_path / "gone.gguf"):
        (found,) = ModelSource.read(settings_of(tmp_path, {"file": str(file), "fallback": str(whole)})).served
        assert (found.spec.path, found.info.path) == (str(whole), str(whole))
        assert file.name in found.info.backend_reason
        with pytest.raises((ModelFileError, ModelNotFoundError), match=file.name):
            ModelSource.read(settings_of(tmp_path, {"file": str(file)}))


def test_the_reason_names_its_backend_where_the_path_contains_the_name(tmp_path: Path) -> None:
    """K8: what serves a file is not to be guessed from where it lies."""
    whole = write_llama(tmp_path / "whole.gguf")
    broken = tmp_path / "llama.gguf"
    broken.write_bytes(whole.read_bytes()[:-100])
    (found,) = ModelSource.read(settings_of(tmp_path, {"file": str(broken), "fallback": str(whole)})).served
    assert found.info.backend_reason.startswith(f"llama: {broken}")


def script(tmp_path: Path) -> Path:
    """Answers of a fake with a template of its own."""
    path = tmp_path / "script.txt"
    path.write_text("a reason</think>twin")
    return path


def test_a_table_that_names_a_backend_and_a_twin_it_cannot_read_is_refused(tmp_path: Path) -> None:
    """K8: both hold, so neither is silently left out."""
    table = {"file": "fake:", "backend": "fake", "fallback": str(write_llama(tmp_path / "twin.gguf"))}
    with pytest.raises(InvalidRequestError, match="fake does not read") as caught:
        ModelSource.read(settings_of(tmp_path, table))
    assert caught.value.param == "models.m.fallback"


# ---------------------------------------------------------------- by what a load and a trial have found


async def test_a_load_that_fails_gives_way_and_an_explicit_backend_does_not(tmp_path: Path) -> None:
    """K8: the twin answers; where the backend was named the error stands, with every way's reason."""
    twin = f"{TWIN},script={script(tmp_path)}"
    table = {"file": BAD, "fallback": twin}
    async with Runtime(settings=settings_of(tmp_path, table)) as runtime:
        assert "a model that reasons" not in runtime.models[0].chat_template
        await text_of(runtime)  # loads it; the answers of a script are those of conversations
        (model,) = runtime.models
        assert (model.path, model.backend) == (twin, "fake")
        assert "a model that reasons" in model.chat_template
        assert model.backend_reason.startswith("fake: ")
        info = await runtime.load_model("m", backend="fake", ctx_size=512)  # the rule again, by name
        assert info.path == twin
        with pytest.raises(UnsupportedError, match="llama does not read fake:") as caught:
            await runtime.load_model("m", backend="llama")
        assert caught.value.param == "backend"
    with pytest.raises(ModelLoadError, match="; "):
        async with Runtime(
            settings=settings_of(tmp_path, {**table, "fallback": f"{BAD},id=x", "load": True})
        ):
            pass


TRIED = """
import os
from pathlib import Path
from hello_backend import HelloReader
COUNT = Path(__file__).with_name("loads.txt")
class Reader(HelloReader):
    def load(self, spec, context):
        if os.environ.get("STOKER_TRIED_HERE") is None:
            with COUNT.open("a") as file:
                file.write("child ")
            {fault}
        return super().load(spec, context)
def open_model(path):
    return Reader()
"""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a backend whose load does something in children; gives its entry and the file of its loads."""

    def write(name: str, fault: str) -> tuple[BackendEntry, Path]:
        (tmp_path / f"{name}.py").write_text(TRIED.format(fault=fault))
        paths = [str(tmp_path), str(Path(__file__).parent), *filter(None, sys.path)]
        monkeypatch.setenv("PYTHONPATH", ":".join(paths))
        monkeypatch.setattr(sys, "path", paths)
        return entry(name, needs=("json",)), tmp_path / "loads.txt"

    yield write
    for name in ("dies_in_children", "works_in_children"):
        sys.modules.pop(name, None)


async def test_a_trial_that_dies_is_remembered_and_the_twin_serves(
    add: Any, folder: Path, tmp_path: Path, tried: Any
) -> None:
    """K8: native code ends the child alone; the next start does not try again, and says the same."""
    broken, loads = tried("dies_in_children", "os.kill(os.getpid(), 11)")
    add(broken)
    table = {"file": str(folder), "fallback": TWIN, "load": True}
    reasons = []
    for _ in range(2):
        async with Runtime(settings=settings_of(tmp_path, table)) as runtime:
            (model,) = runtime.models
            reasons.append(model.backend_reason)
            assert model.path == TWIN
    assert "its trial failed: it died of SIGSEGV" in reasons[0]
    assert reasons[1] == reasons[0]
    assert loads.read_text() == "child "
    (found,) = ModelSource.read(settings_of(tmp_path, table)).served
    assert found.spec.path == TWIN  # known before any load: chats are laid out for what will serve


async def test_a_trial_that_went_well_is_not_repeated(
    add: Any, folder: Path, tmp_path: Path, tried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K8: what a child computed once on this machine is loaded at once."""
    working, loads = tried("works_in_children", "pass")
    add(working)
    monkeypatch.setattr("stoker.backends.trial.trial._logger", None)  # nothing to warn of
    for _ in range(2):
        async with Runtime(settings=settings_of(tmp_path, {"file": str(folder), "load": True})) as runtime:
            assert await text_of(runtime) == "hello"
            assert (runtime.models[0].backend, runtime.models[0].backend_reason) == ("hello", "")
    assert (
        loads.read_text().split().count("child") == 3
    )  # one child, and each engine, which is in this process
