"""Adapters in mlx-lm's format, by their headers: what is one, which model it fits, what is refused."""

import pytest

from model_folders import HEAD_WIDTH, HEADS, LORA, RANK, WIDTH, tiny_adapter, tiny_folder
from stoker.client.models.beside import adapters_by_model
from stoker.errors import InvalidRequestError, ModelFileError, UnsupportedError
from stoker.models.folders.adapters import check_fits_folder, read_folder_adapter
from stoker.models.folders.folder import ModelFolder
from stoker.models.store import ModelStore
from tiny_models import write_llama


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_an_adapter_fits_the_model_that_it_was_made_for(bits, tmp_path):
    """K6, F7."""
    adapter = read_folder_adapter(tiny_adapter(tmp_path / "adapter"))
    assert (adapter.scale, adapter.num_wide) == (2.0, HEADS * HEAD_WIDTH)
    assert adapter.size_bytes == RANK * (WIDTH + HEADS * HEAD_WIDTH) * 4
    check_fits_folder(adapter, ModelFolder.open(tiny_folder(tmp_path / "model", bits=bits)))


def test_an_adapter_is_given_to_the_folder_that_it_fits(tmp_path):
    """K6, F7: and to no GGUF file."""
    tiny_folder(tmp_path / "mamba", "mamba")
    tiny_folder(tmp_path / "llama")
    write_llama(tmp_path / "llama.gguf")
    store = ModelStore(tmp_path / "none")
    models = [store.resolve(tmp_path / name) for name in ("llama.gguf", "mamba", "llama")]
    path = tiny_adapter(tmp_path / "adapter")
    ((model, (spec,)),) = adapters_by_model([f"style={path}@0.5"], models).items()
    assert (model, spec.name, spec.path, spec.scale) == ("llama", "style", str(path), 0.5)
    assert spec.size_bytes == RANK * (WIDTH + HEADS * HEAD_WIDTH) * 4
    with pytest.raises(ModelFileError, match="does not fit mamba"):
        adapters_by_model([f"style={path}"], models[:2])
    with pytest.raises(InvalidRequestError, match="no model is served"):
        adapters_by_model([f"style={path}"], models[:1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"down": (2 * WIDTH, RANK)}, "are .128, 4."),
        ({"up": (RANK, 7)}, "the matrix is"),
        ({"name": "other"}, "no matrix 'other'"),
    ],
)
def test_an_adapter_of_another_model_is_refused(changes, said, tmp_path):
    """K6, F7."""
    model = ModelFolder.open(tiny_folder(tmp_path / "model"))
    with pytest.raises(ModelFileError, match=said):
        check_fits_folder(read_folder_adapter(tiny_adapter(tmp_path / "adapter", **changes)), model)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"up": (5, WIDTH)}, ModelFileError, "factors"),
        ({"config": LORA | {"fine_tune_type": "dora"}}, UnsupportedError, "dora"),
        ({"config": {"lora_parameters": {"scale": "x"}}}, ModelFileError, "scale"),
        ({"config": {"lora_parameters": []}}, ModelFileError, "scale"),
    ],
)
def test_what_is_no_lora_is_refused(changes, error, said, tmp_path):
    """K6, F7."""
    with pytest.raises(error, match=said):
        read_folder_adapter(tiny_adapter(tmp_path / "adapter", **changes))


def test_damaged_adapters_are_refused(tmp_path):
    """K6, F7."""
    path = tiny_adapter(tmp_path / "adapter")
    weights = path / "adapters.safetensors"
    sound = weights.read_bytes()
    for data in (sound[:-1], b"", sound[:20], b"\xff" * 8 + sound[8:]):
        weights.write_bytes(data)
        with pytest.raises(ModelFileError, match=r"adapters\.safetensors"):
            read_folder_adapter(path)
    weights.rename(path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="PEFT"):
        read_folder_adapter(path)
    with pytest.raises(ModelFileError, match="no such folder"):
        read_folder_adapter(tmp_path / "nowhere")
