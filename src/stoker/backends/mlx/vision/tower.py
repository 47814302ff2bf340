"""The weights of a tower, and one square after the other through it: mlx-vlm's classes do the computing.

A graph of MLX is computed where its results are asked for. So the layers of a tower are asked for one by one,
and between two of them other work has its turns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from stoker.backends.mlx.native import Array
from stoker.backends.mlx.vision.families import FAMILIES, tower_tensors
from stoker.backends.mlx.vision.library import model_module

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Rows
    from stoker.models.folders.folder import ModelFolder

_SCALES = ".scales"


class WholeTower(nn.Module):  # type: ignore[misc] # MLX has no types
    """LLaVA's: the patches of one layer, and what makes embeddings of them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = model_module("llava.vision").VisionModel(config.vision_config)
        self.multi_modal_projector = model_module("llava.llava").LlavaMultiModalProjector(config)
        self._layer = config.vision_feature_layer
        self._drops_first = config.vision_feature_select_strategy == "default"

    def layers_of(self, square: Array) -> tuple[list[Array], Array]:
        """The graphs of a square's layers in their order, and of its embeddings (1, tokens, width)."""
        *_, states = self.vision_tower(square, output_hidden_states=True)
        chosen = range(len(states))[self._layer]
        found = states[chosen][:, 1:] if self._drops_first else states[chosen]
        return list(states[: chosen + 1]), self.multi_modal_projector(found)

    def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
        """The weights as MLX has them."""
        found: dict[str, Array] = self.vision_tower.sanitize(weights)
        return found


class TiledTower(nn.Module):  # type: ignore[misc]
    """Idefics3's and SmolVLM's: all patches, several of which become one embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_model = model_module("idefics3.vision").VisionModel(config.vision_config)
        self.connector = model_module("idefics3.idefics3").Idefics3Connector(config)
        self._patch = config.vision_config.patch_size

    def layers_of(self, square: Array) -> tuple[list[Array], Array]:
        """As `WholeTower.layers_of`."""
        _, height, width, _ = square.shape
        sees_all = mx.ones((1, height // self._patch, width // self._patch), dtype=mx.bool_)
        pooled, _, states = self.vision_model(
            square, patch_attention_mask=sees_all, output_hidden_states=True
        )
        return list(states), self.connector(pooled.astype(square.dtype))

    def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
        """The weights as MLX has them."""
        found: dict[str, Array] = self.vision_model.sanitize(weights)
        return found


class Tower:
    """A folder's tower, loaded.

    Attributes:
        weight_bytes: of it.
        width: of an embedding, as the language model takes it.
    """

    def __init__(self, module: WholeTower | TiledTower, width: int) -> None:
        self.weight_bytes = sum(int(array.nbytes) for _, array in tree_flatten(module.parameters()))
        self.width = width
        self._module = module

    def __repr__(self) -> str:
        return f"<Tower of {self.weight_bytes} bytes>"

    def encode(self, squares: Iterable[Rows]) -> Generator[None, None, Rows]:
        """Embeddings of squares, float32 (tokens of all, width); yields after each layer."""
        found = []
        for square in squares:
            layers, embeddings = self._module.layers_of(mx.array(square[None]))
            while layers:
                mx.eval(layers.pop(0))
                yield
            mx.eval(embeddings)
            found.append(np.array(embeddings.astype(mx.float32)).reshape(-1, self.width))
            yield
        return np.concatenate(found)


def open_tower(folder: ModelFolder) -> Tower:
    """Load the tower of a folder of a family that sees. Raises what MLX and mlx-vlm raise."""
    family, width = FAMILIES[folder.architecture], folder.settings.width
    classes = model_module(f"{family.module}.config")
    vision = classes.VisionConfig.from_dict(dict(folder.config["vision_config"]))
    parts = {"vision_config": vision, "text_config": SimpleNamespace(hidden_size=width)}
    config = classes.ModelConfig.from_dict({**folder.config, **parts})
    module = TiledTower(config) if family.is_tiled else WholeTower(config)
    weights = module.sanitize(_weights(folder))
    _quantise(module, weights)
    module.load_weights(list(weights.items()))
    mx.eval(module.parameters())
    module.eval()
    return Tower(module, width)


def small_tower(width: int, edge: int = 32) -> Tower:
    """One of random weights, of tiles; for trials of a machine. Raises ImportError."""
    vision = model_module("idefics3.config").VisionConfig(
        model_type="idefics3_vision",
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        image_size=edge,
        patch_size=edge // 4,
    )
    text = SimpleNamespace(hidden_size=width)
    module = TiledTower(SimpleNamespace(vision_config=vision, text_config=text, scale_factor=2))
    mx.eval(module.parameters())
    return Tower(module, width)


def embeddings(tower: Tower, square: Rows) -> Rows:
    """What a tower makes of one square, at once."""
    layers = tower.encode([square])
    while True:
        try:
            next(layers)
        except StopIteration as end:
            found: Rows = end.value
            return found


def _weights(folder: ModelFolder) -> dict[str, Array]:
    names = tower_tensors(folder)
    files = sorted({each.file for each in names.values()})
    return {
        name.removeprefix("model."): array
        for file in files
        for name, array in mx.load(str(folder.path / file)).items()
        if name in names
    }


def _quantise(module: Any, weights: dict[str, Array]) -> None:
    """Give the matrices that are quantised in the folder modules that take them so."""
    if any(name.endswith(_SCALES) for name in weights):
        nn.quantize(
            module,
            class_predicate=lambda path, matrix: (
                f"{path}{_SCALES}" in weights and infer_quant_config(path, matrix, weights)
            ),
        )
