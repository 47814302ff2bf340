"""Folders of a model before a load: what they say, and what is refused."""

import json
import shutil

import pytest

from model_folders import ARCHITECTURES, SPECIALS, tiny_folder
from stoker.errors import ModelFileError
from stoker.models.folders.folder import ModelFolder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder in three shards."""
    return tiny_folder(tmp_path_factory.mktemp("sound") / "llama", num_shards=3)


@pytest.fixture
def copied(sound, tmp_path):
    """One that a test may damage."""
    return shutil.copytree(sound, tmp_path / "llama")


def _change(path, **changes):
    document = json.loads(path.read_text())
    document |= changes
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_says_what_it_holds(architecture, tmp_path):
    """F1."""
    folder = ModelFolder.open(tiny_folder(tmp_path / "model", architecture))
    assert folder.architecture == architecture
    assert folder.weight_bytes == sum(tensor.size_bytes for tensor in folder.tensors.values())
    assert (folder.quantisation, folder.quantisation_label) == (None, "F32")
    assert folder.eos_tokens == (2,)
    assert (folder.texts.bos_text, folder.texts.eos_text) == SPECIALS[1:]
    assert "<|im_start|>" in folder.chat_template


def test_quantised_weights_have_their_label(tmp_path):
    """F1."""
    folder = ModelFolder.open(tiny_folder(tmp_path / "model", bits=4))
    assert (folder.quantisation.bits, folder.quantisation.group_size) == (4, 32)
    assert folder.quantisation_label == "4-bit"


def test_a_fingerprint_is_of_the_content(sound, tmp_path):
    """C1."""
    other = tiny_folder(tmp_path / "other", seed=8, num_shards=3)
    moved = shutil.copytree(sound, tmp_path / "moved")
    found = [ModelFolder.open(path).fingerprint for path in (sound, moved, other)]
    assert found[0] == found[1] != found[2]


def _cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def _lengthen(path):
    path.write_bytes(path.read_bytes() + b"more")


def _garble(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


_FIRST, _SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / _SECOND).unlink(), f"incomplete.*{_SECOND}"),
        (lambda folder: _cut(folder / _FIRST), "truncated"),
        (lambda folder: _lengthen(folder / _FIRST), "too long"),
        (lambda folder: _garble(folder / _FIRST), "no safetensors file"),
        (lambda folder: (folder / f"{_FIRST}.incomplete").touch(), "not finished"),
        (lambda folder: (folder / "tokenizer.json.part").touch(), "not finished"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "no JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "nested too deep"),
        (lambda folder: _change(folder / "config.json", model_type=3), "model_type"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: _change(folder / "tokenizer_config.json", chat_template=1), "no text"),
        (lambda folder: _change(folder / "config.json", eos_token_id=-2), "eos_token_id"),
        (
            lambda folder: _change(
                folder / "model.safetensors.index.json", weight_map={"a": "../../other.safetensors"}
            ),
            "no safetensors file of the folder",
        ),
        (
            lambda folder: _change(folder / "model.safetensors.index.json", weight_map={"a": _FIRST}),
            "which it does not",
        ),
    ],
)
def test_what_is_not_whole_is_refused(copied, damage, said):
    """F2."""
    damage(copied)
    with pytest.raises(ModelFileError, match=said):
        ModelFolder.open(copied)


def test_shards_without_an_index_are_counted_by_their_names(copied):
    """F2."""
    (copied / "model.safetensors.index.json").unlink()
    assert len(ModelFolder.open(copied).weight_files) == 3
    (copied / _SECOND).unlink()
    with pytest.raises(ModelFileError, match=f"incomplete.*{_SECOND}"):
        ModelFolder.open(copied)


def test_a_template_of_its_own_file_comes_first(copied):
    """F1."""
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": "of json"}))
    assert ModelFolder.open(copied).chat_template == "of json"
    (copied / "chat_template.jinja").write_text("of jinja")
    assert ModelFolder.open(copied).chat_template == "of jinja"


def test_the_default_of_several_templates_is_taken(copied):
    """F1."""
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _change(copied / "tokenizer_config.json", chat_template=named)
    assert ModelFolder.open(copied).chat_template == "plain"


def test_ends_are_those_of_both_configs(copied):
    """F1."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert ModelFolder.open(copied).eos_tokens == (1, 0, 2)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_the_context_counts_what_scaling_adds(copied, scaling, length):
    """F1."""
    _change(copied / "config.json", rope_scaling=scaling)
    assert ModelFolder.open(copied).settings.context_length == length
