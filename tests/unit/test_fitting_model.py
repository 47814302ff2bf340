"""Which model a command takes that was told none: the one that is fit for its work, or a remedy."""

from __future__ import annotations

import pytest

from stoker.cli.fitting_model import EMBED, GENERATE, READ, RERANK, with_fitting_model
from stoker.errors import InvalidRequestError, ModelNotFoundError
from stoker.models import store
from stoker.settings import EngineSettings
from tiny_models import write_bert, write_llama
from tiny_projector import write_projector

RANK = 4


@pytest.fixture
def folder(tmp_path):
    """A decoder, an encoder, a reranker and a projector of the decoder's width."""
    write_llama(tmp_path / "talker.gguf")
    write_bert(tmp_path / "embedder.gguf")
    write_bert(tmp_path / "ranker.gguf", pooling=RANK)
    write_projector(tmp_path / "mmproj-talker.gguf")
    return tmp_path


def chosen(work, folder, *, is_named=False, **fields):
    """Models and projector of the settings that come out."""
    settings = EngineSettings(models_dir=folder, **fields)
    found = with_fitting_model(work, settings, is_named=is_named)
    return [path.removeprefix(f"{folder}/") for path in found.models], found.mmproj


@pytest.fixture
def no_default(monkeypatch):
    """A machine on which the embedded default model is not installed."""
    monkeypatch.setattr(store, "embedded_default", lambda: None)


@pytest.mark.parametrize(("work", "name"), [(EMBED, "embedder"), (RERANK, "ranker")])
def test_the_one_model_that_does_the_work_is_taken(folder, work, name):
    """T5: an encoder in the models folder embeds without -m; the embedded default is not offered."""
    assert chosen(work, folder) == ([name], None)


@pytest.mark.usefixtures("no_default")
def test_without_the_embedded_default_the_one_that_generates_is_taken(folder):
    """T5: a machine whose only model came by `stoker pull` needs no -m either."""
    (folder / "mmproj-talker.gguf").unlink()
    assert chosen(GENERATE, folder) == (["talker"], None)


def test_a_model_that_reads_is_taken_with_its_projector(folder):
    """T5: the pair that belongs together; one that is named keeps its name and gets its projector."""
    projector = folder / "mmproj-talker.gguf"
    assert chosen(READ, folder) == (["talker.gguf"], projector)
    assert chosen(READ, folder, is_named=True, models=(str(folder / "talker.gguf"),)) == (
        ["talker.gguf"],
        projector,
    )


def test_what_is_named_stays(folder):
    """T5: a wrong class is refused by who is asked, with the model's name."""
    assert chosen(EMBED, folder, is_named=True, models=("talker",)) == (["talker"], None)


def test_of_the_models_that_settings_name_the_fit_one_is_taken(folder):
    """T5: a settings file for `serve` with several models does for `embed` too."""
    assert chosen(EMBED, folder, models=("talker", "ranker", "embedder")) == (["embedder"], None)
    with pytest.raises(ModelNotFoundError, match="none of talker, ranker embeds texts"):
        chosen(EMBED, folder, models=("talker", "ranker"))


def test_several_are_not_chosen_between(folder):
    """T5: they are named, with the option that chooses."""
    write_bert(folder / "second.gguf")
    with pytest.raises(InvalidRequestError, match="embedder, second; choose with -m"):
        chosen(EMBED, folder)


@pytest.mark.parametrize("work", [EMBED, RERANK, READ])
def test_where_there_is_none_the_remedy_names_the_folder(tmp_path, work):
    """T5: what to do, and nothing that would not work."""
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)) as caught:
        chosen(work, tmp_path)
    assert "embedded" not in caught.value.message
