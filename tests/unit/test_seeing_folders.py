"""Folders of models that see: who does, why another does not, how pictures are cut, what a tower takes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_folders import tiny_folder
from seeing_folders import EDGE, KINDS, seeing_folder
from stoker.backends.mlx.reader import open_model
from stoker.backends.mlx.vision import families
from stoker.backends.mlx.vision.families import TowerShape, sight_of
from stoker.backends.mlx.vision.views import PREPROCESSOR, PROCESSOR, read_views
from stoker.backends.protocol.backend import PicturePart
from stoker.errors import ModelFileError, UnsupportedError
from stoker.images.turns import require_vision
from stoker.ipc.model import ModelInfo, ModelSpec, Pairing
from stoker.ipc.request import Picture
from stoker.models.folders.folder import ModelFolder
from stoker.models.folders.layers import read_layers

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether mlx-vlm is there is each test's to say."""
    monkeypatch.setattr(families, "installed_version", lambda: "0.7.10")


def _change(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def _pairing(path: Path) -> tuple[str, str]:
    found = open_model(str(path)).describe()
    return found.pairing, found.pairing_reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_a_known_family_sees(kind: str, tmp_path: Path) -> None:
    """SPEC F10, V1, F1: and its tower is a line of its own in what it takes."""
    path = seeing_folder(tmp_path / "m", kind)
    assert _pairing(path) == (Pairing.READY, "")
    folder = ModelFolder.open(path)
    lines = open_model(str(path)).estimator()(ModelSpec(id="m", path=str(path))).lines
    assert lines["weights"] == read_layers(folder).text_bytes
    seen = sum(each.size_bytes for name, each in families.tower_tensors(folder).items())
    assert lines["weights"] + seen == folder.weight_bytes
    assert lines["projector"] > seen


def _no_extra(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "installed_version", lambda: "")


def _no_tower(path: Path, _: pytest.MonkeyPatch) -> None:
    weights = load_file(path / WEIGHTS)
    kept = {name: each for name, each in weights.items() if name.startswith("language_model.")}
    save_file(kept, path / WEIGHTS)


def _config(**changes: Any) -> Any:
    return lambda path, _: _change(path / "config.json", **changes)


def _steps(**changes: Any) -> Any:
    return lambda path, _: _change(path / PREPROCESSOR, **changes)


REFUSED = {
    "no extra": (_no_extra, Pairing.TEXT_ONLY, r"mlx-vlm is not installed: pip install 'stoker\[mlx-vlm\]'"),
    "another text": (
        _config(text_config={"model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 3}),
        Pairing.TEXT_ONLY,
        "a language model of type phi3 was not tried",
    ),
    "no tower": (_no_tower, Pairing.NEEDS_PROJECTOR, "no weights of a tower"),
    "no steps": (lambda path, _: (path / PREPROCESSOR).unlink(), Pairing.BROKEN, f"no {PREPROCESSOR}"),
    "another square": (_steps(crop_size=24), Pairing.BROKEN, "24 x 24 pixels, the tower takes 32 x 32"),
    "no size": (_steps(size={"shortest_edge": 8}), Pairing.BROKEN, "8 pixels are cut to 32 x 32"),
    "an edge of lies": (_steps(size={"shortest_edge": -1}), Pairing.BROKEN, "shortest_edge is -1"),
    "as it is": (_steps(do_resize=False), Pairing.BROKEN, "do_resize is false"),
    "a filter": (_steps(resample=9), Pairing.BROKEN, "resample is 9"),
    "colours": (_steps(image_std=[0, 1, 1]), Pairing.BROKEN, "image_std"),
    "a mean": (_steps(image_mean=["x", 1, 1]), Pairing.BROKEN, "image_mean"),
    "patches": (
        _config(vision_config={"image_size": EDGE, "patch_size": 0}),
        Pairing.BROKEN,
        "patch_size is 0",
    ),
    "layers": (_config(vision_feature_layer=[-2, -1]), Pairing.BROKEN, "one layer can be taken"),
    "a strategy": (_config(vision_feature_select_strategy="all"), Pairing.BROKEN, "'default' and 'full'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_to_see_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC F10, V1: by the model, and by the 400 that a picture gets; text is served."""
    damage, pairing, reason = REFUSED[name]
    path = seeing_folder(tmp_path / "m", "llava-clip")
    damage(path, monkeypatch)
    found = sight_of(ModelFolder.open(path))
    assert found.pairing == pairing
    assert str(tmp_path) not in found.reason
    info = msgspec.structs.replace(
        ModelInfo.bare(ModelSpec(id="m", path=str(path))), pairing=found.pairing, pairing_reason=found.reason
    )
    with pytest.raises(UnsupportedError, match=reason):
        require_vision(info, "messages.0")
    assert "projector" not in open_model(str(path)).estimator()(ModelSpec(id="m", path=str(path))).lines


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma3", "see each other"),
        ("qwen2_vl", "in a grid"),
        ("pixtral", "type llava, idefics3"),
    ],
)
def test_a_family_that_was_not_tried_is_named(kind: str, reason: str, tmp_path: Path) -> None:
    """SPEC F10, V1: its text is served where mlx-lm has its network."""
    path = tiny_folder(tmp_path / "m")
    _change(path / "config.json", model_type=kind, vision_config={"hidden_size": 8})
    found = sight_of(ModelFolder.open(path))
    assert found.pairing == Pairing.TEXT_ONLY
    assert reason in found.reason


def test_a_square_that_does_not_fit_its_tiles_is_refused(tmp_path: Path) -> None:
    """SPEC F10, V1."""
    path = seeing_folder(tmp_path / "m", "smolvlm")
    for change, reason in (
        (_steps(max_image_size={"longest_edge": 64}), "squares of 64 pixels, the tower takes 32"),
        (_steps(size={"height": 9, "width": 9}), "no longest_edge"),
        (_config(scale_factor=3), "cannot be shrunk by 3"),
    ):
        change(path, None)
        with pytest.raises(ModelFileError, match=reason):
            read_views(path, TowerShape.of(ModelFolder.open(path)))
        seeing_folder(path, "smolvlm")


def test_what_a_nested_config_leaves_out_is_what_transformers_has(tmp_path: Path) -> None:
    """F1: LLaVA's on the hub names no sizes of its llama."""
    path = seeing_folder(tmp_path / "m", "llava-clip")
    _change(path / "config.json", text_config={"model_type": "llama", "vocab_size": 320})
    found = ModelFolder.open(path).settings
    assert (found.width, found.num_layers, found.n_vocab, found.context_length) == (4096, 32, 320, 2048)


PROCESSORS = {
    "llava-clip": ("clip", "CLIPImageProcessorPil"),
    "llava-siglip": ("siglip", "SiglipImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("size", [(32, 32), (8, 448), (300, 20), (97, 63), (31, 31), (448, 447)])
def test_pictures_are_cut_as_transformers_cuts_them(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    """SPEC F10, V8: every pixel, whatever the shape; a layout names the squares that come."""
    pytest.importorskip("transformers", reason="MLX is not installed (the mlx extra)")
    module, name = PROCESSORS[kind]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    path = seeing_folder(tmp_path / "m", kind)
    steps = json.loads((path / PREPROCESSOR).read_text())
    pixels = np.random.default_rng(2).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    expected = getattr(found, name)(**steps)([pixels], return_tensors="np")["pixel_values"]
    expected = np.asarray(expected, np.float32).reshape(-1, 3, EDGE, EDGE).transpose(0, 2, 3, 1)
    views = sight_of(ModelFolder.open(path)).views
    squares = np.stack(list(map(views.colours.of, views.cut(Picture(*size, pixels.tobytes())))))
    assert squares.shape == expected.shape
    assert np.abs(squares - expected).max() < 1e-5
    parts = [each for each in views.layout(*size, lambda text: [len(text)]) if isinstance(each, PicturePart)]
    assert len(parts) == len(squares)


def test_steps_may_stand_in_the_file_of_the_whole_processor(tmp_path: Path) -> None:
    """F1: as transformers writes them since its fifth version."""
    path = seeing_folder(tmp_path / "m", "idefics3")
    before = sight_of(ModelFolder.open(path)).views
    steps = json.loads((path / PREPROCESSOR).read_text())
    (path / PREPROCESSOR).unlink()
    (path / PROCESSOR).write_text(json.dumps({"image_processor": steps, "image_seq_len": 4}))
    assert sight_of(ModelFolder.open(path)).views == before


def test_a_model_that_sees_is_described_without_native_code(tmp_path: Path) -> None:
    """F1: neither MLX nor mlx-vlm nor an imaging library."""
    path = seeing_folder(tmp_path / "m", "smolvlm")
    code = (
        "import sys; from stoker.backends.mlx.reader import open_model\n"
        "from stoker.ipc.model import ModelSpec\n"
        "reader = open_model(sys.argv[1]); print(bool(reader.describe().pairing))\n"
        "reader.estimator()(ModelSpec(id='m', path=sys.argv[1]))\n"
        "print([each for each in sys.modules if each.split('.')[0] in {'mlx', 'mlx_lm', 'mlx_vlm', 'PIL'}])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True, text=True)
    assert done.stdout.split("\n")[:2] == ["True", "[]"]
