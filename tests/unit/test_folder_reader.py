"""A folder as a model of MLX: described and estimated without MLX, and refused where it has no such model."""

import json
import subprocess
import sys

import msgspec
import pytest

from model_folders import (
    ARCHITECTURES,
    CONTEXT_LENGTH,
    CONV,
    HEAD_WIDTH,
    INNER,
    NUM_LAYERS,
    SHARED_HEADS,
    STATE,
    WIDTH,
    WINDOW,
    tiny_folder,
)
from stoker.backends.mlx.architectures import Library, library
from stoker.backends.mlx.estimate import STEP_CELLS
from stoker.backends.mlx.reader import open_model
from stoker.backends.registry import is_model_folder
from stoker.errors import ModelFileError, UnsupportedError
from stoker.images.turns import require_hearing, require_vision
from stoker.ipc.model import ModelClass, ModelInfo, ModelSpec, Pairing
from stoker.models.folders.folder import ModelFolder
from stoker.models.folders.layers import read_layers
from stoker.models.memory_estimate.estimate import num_sequences

SLOTS, CELLS = 4, 1024
KV_WIDTH = 2 * SHARED_HEADS * HEAD_WIDTH
FLOAT = 4


def _change(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _kv_bytes(path, kv_type=""):
    spec = ModelSpec(id="m", path=str(path), num_slots=SLOTS, n_ctx=CELLS, kv_type=kv_type)
    return open_model(str(path)).estimator()(spec).lines["kv"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_is_described_as_a_file_is(architecture, tmp_path):
    """F1."""
    path = tiny_folder(tmp_path / "model", architecture)
    found = open_model(str(path)).describe()
    classes = {"mamba": ModelClass.RECURRENT, "lfm2": ModelClass.HYBRID}
    assert found.model_class is classes.get(architecture, ModelClass.DECODER)
    assert (found.architecture, found.quantisation, found.n_embd) == (architecture, "F32", WIDTH)
    assert found.n_ctx_train == (0 if architecture == "mamba" else CONTEXT_LENGTH)
    assert found.has_fixed_context == (architecture != "mamba")
    assert found.num_params * FLOAT == ModelFolder.open(path).weight_bytes
    assert found.chat_template
    assert is_model_folder(path)


def test_parameters_of_quantised_weights_are_those_that_they_stand_for(tmp_path):
    """F1."""
    plain = open_model(str(tiny_folder(tmp_path / "plain"))).describe()
    for bits in (4, 8):
        found = open_model(str(tiny_folder(tmp_path / str(bits), bits=bits))).describe()
        assert (found.num_params, found.quantisation) == (plain.num_params, f"{bits}-bit")
        assert found.size_bytes < plain.size_bytes


def test_a_model_that_was_made_to_see_says_that_only_its_text_is_computed(tmp_path):
    """V1, F1."""
    path = tiny_folder(tmp_path / "model")
    _change(path, vision_config={"hidden_size": 8})
    found = open_model(str(path)).describe()
    assert found.pairing == Pairing.TEXT_ONLY
    bare = ModelInfo.bare(ModelSpec(id="m", path=str(path)))
    info = msgspec.structs.replace(bare, pairing=found.pairing)
    for refused in (require_vision, require_hearing):
        with pytest.raises(UnsupportedError, match="only text is computed"):
            refused(info, "messages")


def test_describing_loads_no_native_code(tmp_path):
    """F1."""
    path = tiny_folder(tmp_path / "model")
    code = (
        "import sys; from stoker.backends.mlx.reader import open_model\n"
        "from stoker.ipc.model import ModelSpec\n"
        "reader = open_model(sys.argv[1]); reader.describe(); reader.fingerprint\n"
        "reader.estimator()(ModelSpec(id='m', path=sys.argv[1]))\n"
        "print([each for each in sys.modules if each.split('.')[0] in {'mlx', 'mlx_lm', 'tokenizers'}])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_keys_and_values_are_those_of_shared_heads(tmp_path):
    """F4: what each slot has begun comes on top."""
    path = tiny_folder(tmp_path / "model")
    cells = CELLS + SLOTS * STEP_CELLS
    assert _kv_bytes(path) == NUM_LAYERS * KV_WIDTH * cells * FLOAT
    assert _kv_bytes(path, "f32") == _kv_bytes(path)
    assert _kv_bytes(path, "q8_0") < _kv_bytes(path) / 3
    assert _kv_bytes(path, "q4_0") < _kv_bytes(path, "q8_0")
    for other in ("f16", "iq4_nl"):
        with pytest.raises(UnsupportedError, match="f32, q8_0, q4_0"):
            _kv_bytes(path, other)


def test_windows_that_rotate_take_no_more_than_the_window(tmp_path):
    """F4."""
    path = tiny_folder(tmp_path / "model", "gemma3_text")
    layers = read_layers(ModelFolder.open(path))
    assert [layer.is_windowed for layer in layers.each] == [True, True, False]
    assert layers.window == WINDOW
    windows = 2 * (WINDOW * num_sequences(SLOTS) + STEP_CELLS * SLOTS)
    assert _kv_bytes(path) == KV_WIDTH * (windows + CELLS + SLOTS * STEP_CELLS) * FLOAT


def test_recurrent_layers_keep_states_however_long_a_text_is(tmp_path):
    """F4."""
    path = tiny_folder(tmp_path / "model", "mamba")
    states = NUM_LAYERS * (INNER * STATE + INNER * (CONV - 1)) * num_sequences(SLOTS)
    assert _kv_bytes(path) == states * FLOAT


def test_hybrid_layers_keep_what_each_of_them_keeps(tmp_path):
    """F4."""
    layers = read_layers(ModelFolder.open(tiny_folder(tmp_path / "model", "lfm2")))
    assert [layer.width for layer in layers.each] == [0, 0, KV_WIDTH]
    assert [layer.state_width for layer in layers.each] == [WIDTH * (CONV - 1)] * 2 + [0]


def test_weights_and_what_mlx_adds_are_lines_of_their_own(tmp_path):
    """F4."""
    path = tiny_folder(tmp_path / "model")
    found = open_model(str(path)).estimator()(ModelSpec(id="m", path=str(path)))
    assert found.lines["weights"] == ModelFolder.open(path).weight_bytes
    assert found.lines["other"] > 50 * 2**20
    assert found.n_ctx == ModelSpec(id="m", path=str(path)).n_ctx


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "an encoder"),
        ({"model_type": "nothing_known"}, "knows no architecture 'nothing_known'"),
        ({"model_type": "../llama"}, "knows no architecture"),
        ({"model_type": "cache"}, "knows no architecture"),
        ({"model_file": "model.py"}, "a program of its own"),
    ],
)
@pytest.mark.skipif(library() is None, reason="the extra mlx is not installed")
def test_what_mlx_has_no_model_for_is_refused_before_a_load(changes, said, tmp_path):
    """F2."""
    path = tiny_folder(tmp_path / "model")
    _change(path, **changes)
    with pytest.raises(UnsupportedError, match=said):
        open_model(str(path)).describe()


@pytest.mark.skipif(library() is None, reason="the extra mlx is not installed")
def test_names_that_mlx_lm_knows_under_another_are_known(tmp_path):
    """F2."""
    assert library().knows("mistral")
    assert library().renamed["mistral"] == "llama"
    assert not Library(tmp_path, "0", {}).knows("llama")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 300}, "vocab_size"),
        ({"hidden_size": 128}, "hidden_size"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "factor"),
        ({"quantization": {"bits": 64}}, "quantization"),
    ],
)
def test_a_config_that_says_what_the_tensors_do_not_is_refused(changes, said, tmp_path):
    """F2."""
    path = tiny_folder(tmp_path / "model")
    _change(path, **changes)
    with pytest.raises(ModelFileError, match=said):
        open_model(str(path)).describe()


@pytest.mark.parametrize(
    ("architecture", "changes", "smaller"),
    [
        ("llama", {}, ()),  # heads narrower than a group
        ("llama", {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}, ("q8_0", "q4_0")),
        ("mamba", {}, ()),
    ],
)
def test_smaller_keys_are_offered_where_mlx_has_them(architecture, changes, smaller, tmp_path):
    """F4."""
    path = tiny_folder(tmp_path / "model", architecture)
    _change(path, **changes)
    assert open_model(str(path)).estimator()(ModelSpec(id="m", path=str(path))).smaller_kv_types == smaller
