"""Pictures on MLX: as mlx-vlm computes them; in slices, in any company, over every way to part with them."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_backend_contract import feed

from seeing_folders import KINDS, seeing_folder
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PicturePart, Placed, PlanItem, Rows
from stoker.cache.radix import image_ids
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.model import ModelSpec, Pairing
from stoker.ipc.request import Picture, Sound
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext

pytest.importorskip("mlx_lm", reason="MLX is not installed (the mlx extra)")

import mlx.core as mx

from stoker.backends.mlx import step
from stoker.backends.mlx.backend import MlxBackend
from stoker.backends.mlx.model import load_backend
from stoker.backends.mlx.vision.library import installed_version, model_module
from stoker.backends.mlx.vision.views import PREPROCESSOR

if not installed_version():
    pytest.skip("mlx-vlm is not installed (the mlx-vlm extra)", allow_module_level=True)

WEIGHTS = "model.safetensors"
Loaded = Callable[[str], MlxBackend]
BEFORE, AFTER = [70, 71, 72, 40], [90, 33, 91]
NEAR = 2e-4
"""Between two orders of the same sums, logits being of a few units."""
PROCESSORS = {
    "llava-clip": ("clip", "CLIPImageProcessorPil"),
    "llava-siglip": ("siglip", "SiglipImageProcessorPil"),
    "llava-qwen2": ("siglip", "SiglipImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
}


def loaded(path: Path, **fields: Any) -> MlxBackend:
    """A folder's model with few cells."""
    given = {"num_slots": 4, "n_ctx": 512, "n_batch": 16, "num_threads": 1, **fields}
    return load_backend(
        ModelFolder.open(path), ModelSpec(id="m", path=str(path), **given), LoadContext(lambda _: None)
    )


@pytest.fixture(scope="module")
def load_seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A function from one of `KINDS` to its model, loaded once; every sequence is empty."""
    folder = tmp_path_factory.mktemp("seeing")
    found: dict[str, MlxBackend] = {}

    def load(kind: str) -> MlxBackend:
        if kind not in found:
            found[kind] = loaded(seeing_folder(folder / kind, kind))
        for seq in range(found[kind].capabilities.num_sequences):
            found[kind].drop(seq)
        return found[kind]

    load.folder = folder  # type: ignore[attr-defined]
    yield load
    for backend in found.values():
        backend.close()


def picture(seed: int = 1, width: int = 50, height: int = 40) -> Picture:
    """One of noise."""
    rgb = np.random.default_rng(seed).integers(0, 256, width * height * 3, dtype=np.uint8)
    return Picture(width, height, rgb.tobytes())


def encoded(backend: MlxBackend, shown: Picture, budget_s: float = 60.0) -> Rows:
    """Its embeddings."""
    encoding = backend.extensions.vision.begin(shown)
    while not encoding.run(budget_s):
        pass
    return encoding.result()


class Prompt:
    """A text with a picture in it: its tokens, and what stands at their places."""

    def __init__(self, backend: MlxBackend, shown: Picture) -> None:
        rows = encoded(backend, shown)
        ids = image_ids(shown.content, len(rows))
        self.tokens, self.placed, offset = list(BEFORE), [], 0
        for part in backend.extensions.vision.layout(shown):
            if isinstance(part, PicturePart):
                end = offset + part.num_tokens
                self.placed.append(Placed(len(self.tokens), rows[offset:end], part))
                self.tokens += ids[offset:end]
                offset = end
            else:
                self.tokens += part
        assert offset == len(rows)
        self.tokens += AFTER
        self.conditioning = Conditioning(pictures=tuple(self.placed))

    def items(self, most: int) -> Iterator[tuple[int, list[int]]]:
        """Starts and tokens of slices, each of text or of a part of one picture."""
        ends = {0, len(self.tokens), *(each.start for each in self.placed), *map(self.end, self.placed)}
        for begin, end in itertools.pairwise(sorted(ends)):
            for at in range(begin, end, most):
                yield at, self.tokens[at : min(at + most, end)]

    @staticmethod
    def end(placed: Placed) -> int:
        """Tokens before and in it."""
        return placed.start + len(placed.embeddings)

    def read(self, backend: MlxBackend, seq: int, most: int = 16) -> Rows:
        """The logits after it."""
        backend.extensions.conditioner.condition(seq, self.conditioning)
        held = backend.length(seq)
        for start, tokens in self.items(most):
            rest = tokens[max(0, held - start) :]
            if rest:
                row = feed(backend, seq, rest, 1)
        return row[-1]


class Reference:
    """mlx-vlm's own model of a folder, with the pixels that transformers' processor makes."""

    def __init__(self, path: Path, kind: str) -> None:
        self.config = json.loads((path / "config.json").read_text())
        package = model_module(self.config["model_type"])
        parts = {
            "text_config": package.TextConfig.from_dict(self.config["text_config"]),
            "vision_config": package.VisionConfig.from_dict(self.config["vision_config"]),
        }
        self.model = package.Model(package.ModelConfig.from_dict({**self.config, **parts}))
        weights = mx.load(str(path / "model.safetensors"))
        if hasattr(self.model, "sanitize"):
            weights = self.model.sanitize(weights)
        for part in (package.VisionModel(parts["vision_config"]), self.model.language_model):
            weights = part.sanitize(weights)
        self.model.load_weights(list(weights.items()))
        module, name = PROCESSORS[kind]
        found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
        self.processor = getattr(found, name)(**json.loads((path / PREPROCESSOR).read_text()))

    def logits(self, prompt: Prompt, shown: Picture) -> Rows:
        """After the prompt."""
        number = self.config.get("image_token_id", self.config.get("image_token_index"))
        tokens = [number if token < 0 else token for token in prompt.tokens]
        pixels = np.frombuffer(shown.rgb, np.uint8).reshape(shown.height, shown.width, 3)
        given = self.processor([pixels], return_tensors="np")["pixel_values"]
        out = self.model(mx.array([tokens]), mx.array(np.asarray(given, np.float32)), mask=None)
        return np.array(out.logits[0, -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(50, 40), (20, 90)])
def test_mlx_vlm_computes_the_same(load_seeing: Loaded, kind: str, size: tuple[int, int]) -> None:
    """SPEC F10, V3: pixels, tower, embeddings and logits; whole pictures and tiles, in slices of a prompt."""
    backend = load_seeing(kind)
    assert (backend.capabilities.has_vision, backend.capabilities.pairing) == (True, Pairing.READY)
    shown = picture(1, *size)
    prompt = Prompt(backend, shown)
    expected = Reference(load_seeing.folder / kind, kind).logits(prompt, shown)
    found = prompt.read(backend, 0)
    assert np.abs(found - expected).max() < NEAR
    assert np.abs(Prompt(backend, picture(2, *size)).read(backend, 1) - expected).max() > 100 * NEAR


def as_others_write_it(path: Path, kind: str) -> None:
    """The tensors of a folder by other names: LLaVA's as the hub has them now, Idefics3's as mlx-vlm."""
    found = {}
    for name, values in load_file(path / WEIGHTS).items():
        if kind == "idefics3":
            name = name.removeprefix("model.").replace("text_model.", "language_model.")  # noqa: PLW2901
            name = f"language_model.{name}" if name.startswith("lm_head") else name  # noqa: PLW2901
            values = values.transpose(0, 2, 3, 1) if values.ndim == 4 else values  # noqa: PLW2901
        elif name.startswith("language_model."):
            inner = name.removeprefix("language_model.")
            name = inner.replace("model.", "model.language_model.")  # noqa: PLW2901
        else:
            name = f"model.{name}"  # noqa: PLW2901
        found[name] = np.ascontiguousarray(values)
    save_file(found, path / WEIGHTS)


@pytest.mark.parametrize("kind", ["llava-clip", "idefics3"])
def test_tensors_go_by_any_of_their_names(load_seeing: Loaded, tmp_path: Path, kind: str) -> None:
    """SPEC F10: as the hub has them, and has had them, and as mlx-vlm writes them, in MLX's own layout."""
    path = seeing_folder(tmp_path / "m", kind)
    as_others_write_it(path, kind)
    other, shown = loaded(path), picture()
    backend = load_seeing(kind)
    found, expected = (Prompt(each, shown).read(each, 0) for each in (other, backend))
    assert np.array_equal(found, expected)
    other.close()


def test_a_projector_may_be_quantised(load_seeing: Loaded, tmp_path: Path) -> None:
    """SPEC F10: as mlx-vlm quantises Idefics3's, beside the language model."""
    path = seeing_folder(tmp_path / "m", "idefics3")
    backend, shown = load_seeing("idefics3"), picture()
    weights = load_file(path / WEIGHTS)
    name = "model.connector.modality_projection.proj"
    parts = mx.quantize(mx.array(weights.pop(f"{name}.weight")), group_size=32, bits=8)
    for part, values in zip(("weight", "scales", "biases"), parts, strict=True):
        weights[f"{name}.{part}"] = np.array(values)
    save_file(weights, path / WEIGHTS)
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (path / "config.json").write_text(json.dumps(config))
    other = loaded(path)
    found, expected = encoded(other, shown), encoded(backend, shown)
    assert 0 < np.abs(found - expected).max() < 0.1
    other.close()


@pytest.mark.parametrize("kind", ["llava-clip", "idefics3"])
def test_a_slice_ends_with_its_layer_and_slices_compute_the_same(load_seeing: Loaded, kind: str) -> None:
    """SPEC F10, V3: so nobody waits longer for an encode than for a layer; one given up leaves nothing."""
    backend = load_seeing(kind)
    vision, whole = backend.extensions.vision, encoded(backend, picture())
    given_up = vision.begin(picture(5))
    assert not given_up.run(1e-9)
    given_up.cancel()
    encoding, num_slices = vision.begin(picture()), 1
    while not encoding.run(1e-9):
        num_slices += 1
    assert num_slices > 3
    assert np.array_equal(encoding.result(), whole)


@pytest.mark.parametrize("kind", ["llava-clip", "idefics3"])
def test_an_encode_takes_no_more_than_was_counted(load_seeing: Loaded, kind: str) -> None:
    """SPEC F10, F4: beside its weights, which are there already."""
    backend = load_seeing(kind)
    counted = backend.memory()["projector"] - backend.extensions.vision.weight_bytes
    encoded(backend, picture())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    encoded(backend, picture())
    assert counted / 8 < mx.get_peak_memory() - before < counted


def test_pictures_are_held_by_forks_states_and_rows(load_seeing: Loaded) -> None:
    """SPEC F10, C11: a cut inside of a picture, a state put back, and rows that decode beside each other."""
    backend = load_seeing("llava-clip")
    prompt = Prompt(backend, picture())
    expected = prompt.read(backend, 0)
    (placed,) = prompt.placed
    backend.fork(0, 1, placed.start + 5)
    assert np.abs(prompt.read(backend, 1, most=3) - expected).max() < NEAR
    backend.trim(1, placed.start + 2)
    assert np.abs(prompt.read(backend, 1) - expected).max() < NEAR
    backend.extensions.states.import_state(2, backend.extensions.states.export_state(0))
    other = Prompt(backend, picture(3))
    other.read(backend, 3)
    rows = [feed(backend, seq, [60])[0] for seq in (0, 2)]
    assert np.array_equal(*rows)
    alone = feed(backend, 3, [61])[0]
    other.read(backend, 4)
    items = (PlanItem(1, len(prompt.tokens), [60], 1), PlanItem(4, len(other.tokens), [61], 1))
    beside = backend.launch(BatchPlan(items)).rows()
    assert np.abs(beside - np.stack([rows[0], alone])).max() < NEAR
    backend.check()


def test_a_few_tokens_of_a_picture_beside_rows_are_of_the_picture(load_seeing: Loaded) -> None:
    """SPEC F10: as the planner cuts them where others decode."""
    backend = load_seeing("llava-clip")
    prompt = Prompt(backend, picture())
    alone = prompt.read(backend, 0)
    feed(backend, 1, AFTER)
    feed(backend, 2, AFTER)
    expected = feed(backend, 1, [60])[0]
    backend.trim(1, len(AFTER))
    backend.extensions.conditioner.condition(3, prompt.conditioning)
    for start, tokens in prompt.items(2):
        if not start:
            found = feed(backend, 3, tokens)
            continue
        rows = tuple(PlanItem(seq, len(AFTER), [60], 1) for seq in (1, 2))
        found = backend.launch(BatchPlan((*rows, PlanItem(3, start, tokens, 1)))).rows().copy()
        assert np.abs(found[:2] - expected).max() < NEAR
        for seq in (1, 2):
            backend.trim(seq, len(AFTER))
    assert np.abs(found[-1] - alone).max() < NEAR


@pytest.mark.parametrize("way", ["computed", "imported", "forked"])
def test_what_a_failed_pass_spoils_is_seen_again(
    load_seeing: Loaded, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """SPEC F10, F8: its embeddings are with the sequence, whoever has given the picture up meanwhile."""
    backend = load_seeing("idefics3")
    prompt = Prompt(backend, picture())
    prompt.read(backend, 0)
    seq = 0
    if way == "imported":
        seq = 1
        backend.extensions.states.import_state(1, backend.extensions.states.export_state(0))
    elif way == "forked":
        seq = 1
        backend.fork(0, 1, len(prompt.tokens))
    expected = feed(backend, seq, [60])[0]
    backend.trim(seq, len(prompt.tokens) - 1)
    feed(backend, seq, prompt.tokens[-1:])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(step.mx, "eval", fail)
    with pytest.raises(StepFailedError, match="gone"):
        feed(backend, seq, [60])
    monkeypatch.undo()
    backend.extensions.conditioner.condition(seq, Conditioning())
    assert np.abs(feed(backend, seq, [60])[0] - expected).max() < NEAR
    backend.check()


def test_a_picture_without_embeddings_changes_nothing(load_seeing: Loaded) -> None:
    """SPEC F10: nor does a recording, which the model does not hear."""
    backend = load_seeing("llava-clip")
    feed(backend, 0, BEFORE)
    ids = image_ids(b"x", 4)
    with pytest.raises(StepFailedError, match="no embeddings"):
        backend.launch(BatchPlan((PlanItem(1, 0, AFTER, 1), PlanItem(0, len(BEFORE), ids, 1))))
    assert [backend.length(seq) for seq in (0, 1)] == [len(BEFORE), 0]
    assert np.array_equal(feed(backend, 1, AFTER), feed(backend, 2, AFTER))
    backend.check()
    with pytest.raises(UnsupportedError, match="no recordings"):
        backend.extensions.vision.layout(Sound(16_000, b"\0\0" * 16))


@pytest.mark.long
def test_a_tower_that_does_not_load_leaves_the_text(tmp_path: Path) -> None:
    """SPEC F10, V1: as a projector that does not fit; the reason is with the model."""
    path = seeing_folder(tmp_path / "m", "idefics3")
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] += 1
    (path / "config.json").write_text(json.dumps(config))
    backend = loaded(path)
    found = backend.capabilities
    assert (found.has_vision, found.pairing, backend.extensions.vision) == (False, Pairing.BROKEN, None)
    assert "does not load its tower" in found.pairing_reason
    assert feed(backend, 0, BEFORE).shape == (1, found.n_vocab)
    with pytest.raises(UnsupportedError, match="nothing beside them"):
        backend.extensions.conditioner.condition(
            0, Conditioning(pictures=(Placed(0, np.zeros((1, 64), np.float32)),))
        )
    backend.close()
