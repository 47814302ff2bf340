"""Folders that are models, by name and path; pulled from a hub, listed, planned and checked as files are."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from hub_stand_in import HubStandIn
from model_folders import tiny_folder
from stoker.cli.app import app
from stoker.errors import DownloadError, ModelFileError, ModelNotFoundError
from stoker.models.hub.downloads import HubReference
from stoker.models.hub.hub import PullRequest, pull
from stoker.models.store import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REPO = "acme/Tiny-0.1B-4bit"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder with one in OWNER/REPO."""
    folder = tmp_path / "models"
    monkeypatch.setenv("STOKER_MODELS_DIR", str(folder))
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    tiny_folder(folder / REPO)
    return folder


@pytest.mark.parametrize("ref", ["Tiny-0.1B-4bit", "tiny-0.1b-4bit", REPO])
def test_a_folder_is_found_by_its_name_and_its_repository(models: Path, ref: str) -> None:
    """F5: dots of a name are no suffix."""
    found = ModelStore(models).resolve(ref)
    assert (found.id, found.path) == ("Tiny-0.1B-4bit", str(models / REPO))
    assert found.size_bytes == sum(file.stat().st_size for file in (models / REPO).iterdir())
    assert ModelStore(models).resolve_listed(ref) == found


def test_a_folder_is_found_by_its_path(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5."""
    monkeypatch.chdir(models / REPO)
    for path in (models / REPO, "."):
        assert ModelStore(models / "none").resolve(path).id == "Tiny-0.1B-4bit"


def test_a_place_of_models_is_no_model_and_weights_alone_are_none(models: Path) -> None:
    """F5."""
    with pytest.raises(ModelFileError, match="there is no model: no GGUF file, no safetensors"):
        ModelStore(models).resolve(models / "acme")
    (models / "acme" / "a.gguf").touch()
    with pytest.raises(ModelFileError, match="a folder; give the GGUF file in it"):
        ModelStore(models).resolve(models / "acme")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelFileError, match="give the folder"):
            ModelStore(models).resolve(models / REPO / name)
    with pytest.raises(ModelNotFoundError, match="no model"):
        ModelStore(models).resolve_listed("acme")
    with pytest.raises(ModelNotFoundError, match="give a GGUF file, a folder, or run"):
        ModelStore(models).resolve("zzz")


def test_two_folders_of_one_name_are_told_apart(models: Path) -> None:
    """F5."""
    shutil.copytree(models / REPO, models / "other" / "Tiny-0.1B-4bit")
    assert [each.id for each in ModelStore(models).list()][-2:] == [
        "Tiny-0.1B-4bit",
        "other/Tiny-0.1B-4bit",
    ]


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    return done.exit_code, done.output


def test_commands_take_a_folder_as_they_take_a_file(models: Path, tmp_path: Path) -> None:
    """F5: models, plan and config check."""
    code, said = _run("models", "--json")
    entry = next(each for each in json.loads(said) if each["path"] == str(models / REPO))
    assert (entry["class"], entry["quantisation"], entry["error"]) == ("decoder", "F32", None)
    code, said = _run("plan", REPO, "--json")
    assert code == 0
    planned = json.loads(said)
    assert planned["bytes"].keys() >= {"weights", "kv", "compute", "other"}
    assert planned["n_ctx_train"] == 2048
    file = tmp_path / "stoker.toml"
    file.write_text(f'[models.tiny]\nfile = "{REPO}"\n')
    code, said = _run("config", "check", str(file))
    assert code == 0, said
    (models / REPO / "model.safetensors").write_bytes(b"nothing")
    code, said = _run("config", "check", str(file))
    assert code != 0
    assert "no safetensors file" in said
    assert "broken" in _run("models")[1]


# ---------------------------------------------------------------- the hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    """A hub with a folder, and what is of no use beside it."""
    source = tiny_folder(tmp_path / "source", num_shards=2)
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    others = {"README.md": b"hello", "original/model.safetensors": b"x", "pytorch_model.bin": b"x"}
    with HubStandIn(repo=REPO, files=files | others) as stand_in:
        yield stand_in


def _pull(hub: HubStandIn, folder: Path, reference: str = REPO) -> Path:
    request = PullRequest(
        reference=reference, models_dir=folder, endpoint=hub.endpoint, attempts=2, backoff_s=0.0
    )
    return pull(request, lambda *_: None)


def test_a_folder_is_pulled_whole_and_config_comes_last(hub: HubStandIn, tmp_path: Path) -> None:
    """F5, L7."""
    path = _pull(hub, tmp_path / "models")
    assert path == tmp_path / "models" / REPO
    assert ModelStore(tmp_path / "models").resolve(REPO).path == str(path)
    fetched = [asked.rpartition("/")[2] for _, asked, _ in hub.requests if "/resolve/" in asked]
    assert fetched[-1] == "config.json"
    assert {"README.md", "pytorch_model.bin"}.isdisjoint(fetched)
    assert sorted(each.name for each in path.iterdir()) == sorted(fetched)


def test_a_pull_that_breaks_leaves_no_model(hub: HubStandIn, tmp_path: Path) -> None:
    """F5, F2."""
    hub.cut_after[SHARDS[1]] = [100, 0, 0]
    with pytest.raises(DownloadError):
        _pull(hub, tmp_path / "models")
    with pytest.raises(ModelFileError, match=r"not finished .*\.incomplete"):
        ModelStore(tmp_path / "models").resolve(REPO)
    _pull(hub, tmp_path / "models")
    assert ModelStore(tmp_path / "models").resolve(REPO)


def test_the_damaged_file_of_a_folder_is_fetched_again_and_no_other(hub: HubStandIn, tmp_path: Path) -> None:
    """F5."""
    path = _pull(hub, tmp_path / "models")
    damaged = path / SHARDS[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    hub.requests.clear()
    _pull(hub, tmp_path / "models")
    assert damaged.read_bytes() == hub.files[SHARDS[0]]
    fetched = {asked.rpartition("/")[2] for _, asked, _ in hub.requests if "/resolve/" in asked}
    assert fetched == {SHARDS[0]}


def test_what_arrives_damaged_is_fetched_once_more(hub: HubStandIn, tmp_path: Path) -> None:
    """F5, L7."""
    hub.announced[SHARDS[0]] = "0" * 64
    with pytest.raises(DownloadError, match="not what the hub announced"):
        _pull(hub, tmp_path / "models")
    asked = [path for method, path, _ in hub.requests if method == "GET" and path.endswith(SHARDS[0])]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("names", "selector", "first"),
    [
        (["config.json", "model.safetensors", "a-Q8_0.gguf"], "", "a-Q8_0.gguf"),
        (["config.json", "model.safetensors", "a-Q8_0.gguf"], "safetensors", "model.safetensors"),
        (["config.json", "llm.mnn", "llm.mnn.weight", "tokenizer.txt"], "", "llm.mnn"),
    ],
)
def test_a_folder_is_chosen_where_there_is_no_file_or_it_is_asked_for(
    names: list[str], selector: str, first: str
) -> None:
    """F5."""
    assert HubReference("acme/m", selector).choose(names)[0] == first


def test_a_repository_without_either_says_what_it_has(hub: HubStandIn, tmp_path: Path) -> None:
    """F5."""
    del hub.files["config.json"]
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        _pull(hub, tmp_path / "models")
