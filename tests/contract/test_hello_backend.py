"""Somebody adds a backend: one folder, one line in the registry."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from stoker.backends import registry
from stoker.backends.registry import BackendEntry, OpenModels
from stoker.client.requests.stream import TextDelta
from stoker.errors import BackendUnavailableError, StokerError, UnsupportedError
from stoker.sync import Runtime

LINE = BackendEntry("hello", "hello_backend", scheme="hello:")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Runtime:
    """The library with one line more in its registry."""
    monkeypatch.setattr(registry, "BACKENDS", (LINE, *registry.BACKENDS))
    with Runtime(model="hello:", isolation="thread", cache_dir=tmp_path, models_dir=tmp_path, slots=2) as rt:
        yield rt


def said(deltas: Iterable[TextDelta]) -> str:
    """The whole text."""
    return "".join(delta.text for delta in deltas)


def test_it_answers_hello(runtime: Runtime) -> None:
    """A chat, the same again over the cells that the first has left, and text after a prompt."""
    for _ in range(2):
        assert said(runtime.chat([{"role": "user", "content": "Who are you?"}], temperature=0.0)) == "hello"
    assert said(runtime.generate("Say hel", temperature=0.0, max_tokens=1)) == "l"
    assert said(runtime.generate("Say: ", stop=["ll"], temperature=0.0)) == "he"
    assert said(runtime.generate("Say: ", regex="hex", temperature=0.0)) == "hex"
    assert [model.architecture for model in runtime.models] == ["hello"]


def test_what_it_has_not_is_refused_by_name(runtime: Runtime) -> None:
    """A backend without an extension costs the caller a typed error, and no other request anything."""
    with pytest.raises(UnsupportedError, match="says hello"):
        runtime.choose("Which?", ["one", "two"])
    assert said(runtime.generate("Say: ", temperature=0.0)) == "hello"


def test_what_loses_its_cells_is_computed_again(runtime: Runtime) -> None:
    """Its states cannot be exported: a pool that is too small for all of them costs time and no answer."""
    answers = [runtime.generate(f"{number} " * 100, temperature=0.0) for number in range(6)]
    assert [said(answer) for answer in answers] == ["hello"] * 6


def test_the_registry_opens_what_nobody_claims_with_the_last_entry() -> None:
    """GGUF is one reader among others, and says what is wrong with a file of no known kind."""
    assert registry.has_scheme("fake:id=a")
    assert not registry.has_scheme("hello:")
    with pytest.raises(StokerError, match="no-such-file"):
        OpenModels().open("no-such-file")


def test_a_folder_is_a_model_by_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A folder is read by who knows one of its files; what is not installed is told with its extra."""
    entry = BackendEntry(
        "other", "no_such_module", folder_files=("*.other",), needs=("no_such_library", "json"), extra="more"
    )
    monkeypatch.setattr(registry, "BACKENDS", (entry, *registry.BACKENDS))
    (tmp_path / "model").mkdir()
    assert not registry.is_model_folder(tmp_path / "model")
    (tmp_path / "model" / "weights.other").touch()
    assert registry.is_model_folder(tmp_path / "model")
    assert not registry.is_model_folder(tmp_path)
    assert entry.missing == ("no_such_library",)
    with pytest.raises(BackendUnavailableError, match=r"no_such_module is not installed.*stoker\[more\]"):
        registry.open_model(str(tmp_path / "model"))
