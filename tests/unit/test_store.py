from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gguf_files import write_tiny

from stoker.errors import ModelFileError, ModelNotFoundError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.models import store as store_module
from stoker.models.store import DEFAULT_ID, ModelStore, embedded_default

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store over `tmp_path` on a machine without the embedded model."""
    monkeypatch.setattr(store_module, "embedded_default", lambda: None)
    return ModelStore(tmp_path)


def test_no_name_means_the_embedded_model(tmp_path: Path) -> None:
    """SPEC R1, K1: the default is found, read and described without a native load."""
    if embedded_default() is None:
        pytest.skip("the demo extra is not installed")
    found = ModelStore(tmp_path / "nowhere").resolve(None)
    assert found.id == DEFAULT_ID
    assert found.model_class is ModelClass.DECODER
    assert found.quantisation == "Q4_1"
    assert found.n_ctx_train == 8192
    assert found.size_bytes == 98_362_432
    assert found.path == str(embedded_default())


def test_the_embedded_model_is_listed_and_found_by_name(tmp_path: Path) -> None:
    """SPEC S1: what the list shows can be asked for, in any case."""
    if embedded_default() is None:
        pytest.skip("the demo extra is not installed")
    store = ModelStore(tmp_path)
    assert [entry.id for entry in store.list()] == [DEFAULT_ID]
    assert store.resolve(DEFAULT_ID.upper()) == store.resolve(None)


def test_no_model_at_all_says_what_to_do(bare: ModelStore) -> None:
    """SPEC L7: one line with the extra, the flag and the command."""
    with pytest.raises(ModelNotFoundError) as caught:
        bare.resolve(None)
    message = str(caught.value)
    assert "\n" not in message
    for advice in ("stoker[demo]", "--model FILE", "stoker pull REPO"):
        assert advice in message


def test_a_path_is_taken_as_it_is(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC R1: a file anywhere is served under its name without the ending."""
    path = write_tiny(tmp_path.parent / f"{tmp_path.name}-elsewhere" / "My.Tiny.gguf")
    for ref in (path, str(path)):
        found = bare.resolve(ref)
        assert (found.id, found.path) == ("My.Tiny", str(path))
    assert found.model_class is ModelClass.DECODER
    assert found.size_bytes == path.stat().st_size
    assert (found.n_ctx_train, found.quantisation) == (256, "F32")


def test_names_are_found_in_folders_in_any_case(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC S1: files below the models folder go by their name, case does not matter, the ending may stay."""
    path = write_tiny(tmp_path / "acme" / "repo" / "Tiny-F32.gguf")
    for ref in ("Tiny-F32", "tiny-f32", "TINY-F32.GGUF", "acme/repo/Tiny-F32.gguf"):
        assert bare.resolve(ref).path == str(path)


def test_two_files_of_one_name_are_told_apart_by_their_folder(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC S1: no file is hidden behind another."""
    write_tiny(tmp_path / "a" / "tiny.gguf")
    second = write_tiny(tmp_path / "b" / "Tiny.gguf", num_layers=1)
    assert [entry.id for entry in bare.list()] == ["tiny", "b/Tiny"]
    assert bare.resolve("b/tiny").path == str(second)


def test_an_unknown_name_shows_what_is_near(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC S3: unknown model, with names that may be meant."""
    for name in ("smollm2-135m", "smollm2-360m", "qwen"):
        write_tiny(tmp_path / f"{name}.gguf")
    with pytest.raises(ModelNotFoundError, match="near it: smollm2-") as caught:
        bare.resolve("smolm2-135m")
    assert "qwen" not in str(caught.value)
    for resolve in (bare.resolve, bare.resolve_listed):
        with pytest.raises(ModelNotFoundError, match=r"known: qwen, smollm2-135m.*stoker pull"):
            resolve("zzzz")


@pytest.mark.parametrize("ref", ["missing.gguf", "some/where/model.gguf", "/no/such/file"])
def test_a_path_that_is_not_there_is_one_line(bare: ModelStore, ref: str) -> None:
    """SPEC R7: no such file, said in one line with the path."""
    with pytest.raises(ModelNotFoundError, match=rf"^no such model file: {ref}$"):
        bare.resolve(ref)


def test_a_folder_is_no_model(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC R7: a folder is a typed error, not a traceback."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFileError, match="a folder"):
        bare.resolve(tmp_path / "folder")


@pytest.mark.parametrize("ref", ["x" * 300, "é" * 200, f"{'x' * 300}/y"])
def test_a_name_that_no_file_can_have_is_not_found(bare: ModelStore, ref: str) -> None:
    """SPEC R7: a part of a path has 255 bytes at most; the system's own words are no answer to a caller."""
    for resolve in (bare.resolve, bare.resolve_listed):
        with pytest.raises(ModelNotFoundError):
            resolve(ref)


@pytest.mark.parametrize("ref", [".", "/", ".."])
def test_folders_without_a_name_of_their_own_are_no_models_either(bare: ModelStore, ref: str) -> None:
    """SPEC R7."""
    with pytest.raises(ModelFileError, match="folder"):
        bare.resolve(ref)


def test_broken_files_are_listed_with_their_error(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC R1, R7: one broken file neither hides the others nor counts as a model."""
    write_tiny(tmp_path / "good.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    write_tiny(tmp_path / "projector.gguf", architecture="clip")
    (tmp_path / "half.gguf.0123.incomplete").write_bytes(b"GGUF")
    entries = {entry.id: entry for entry in bare.list()}
    assert set(entries) == {"broken", "good", "projector"}
    assert entries["good"].error is None
    assert entries["broken"].error is not None
    assert entries["broken"].error.code == ModelFileError.code
    assert entries["projector"].error is not None
    assert entries["projector"].error.code == UnsupportedError.code
    with pytest.raises(ModelFileError, match="truncated"):
        bare.resolve("broken")


def test_a_split_model_is_one_entry(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC R7: shards are listed once, under the name without a number and with all their bytes."""
    write_tiny(tmp_path / "tiny.gguf", shard_tensors=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 1
    (entry,) = bare.list()
    assert entry.id == "tiny"
    assert entry.path == str(files[0])
    assert entry.size_bytes == sum(file.stat().st_size for file in files)
    assert bare.resolve("tiny") == entry


def test_a_models_folder_that_is_not_there_is_empty(bare: ModelStore, tmp_path: Path) -> None:
    """SPEC R7: nothing is created by looking."""
    assert ModelStore(tmp_path / "none").list() == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("ref", ["fake:", "fake:slow"])
def test_the_fake_backend_has_a_name(bare: ModelStore, ref: str) -> None:
    """SPEC K1: tests and demonstrations ask for the deterministic backend by reference."""
    found = bare.resolve(ref)
    assert (found.id, found.path) == ("fake", ref)
