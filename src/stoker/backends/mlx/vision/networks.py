"""The language models inside of models that see, as networks of mlx-lm.

mlx-lm has no module for some of these families, and for others one that takes a single kind of language
model. Weights have several names: as the hub has them, as it had them before, and as mlx-vlm writes them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx import nn
from mlx_lm.utils import _get_classes

from stoker.backends.mlx.native import Array
from stoker.backends.mlx.vision.families import FAMILIES, Family, text_type
from stoker.models.folders.config import FolderConfig

_MODULES = {"mistral": "llama"}
_INNER = ("language_model.", "text_model.")
_OUTPUT, _UNTIED = "lm_head.", "lm_head"


@dataclass
class InnerArgs:
    """Arguments of the language model, and which tensors are not its own."""

    inner: Any
    module: Any
    family: Family

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> InnerArgs:
        """Those of a config."""
        name = text_type(config)
        module = importlib.import_module(f"mlx_lm.models.{_MODULES.get(name, name)}")
        text = {**FolderConfig(Path(), config).text, "model_type": name, "tie_word_embeddings": False}
        return cls(module.ModelArgs.from_dict(text), module, FAMILIES[config["model_type"]])


class InnerNetwork(nn.Module):  # type: ignore[misc] # MLX has no types
    """The language model of a model that sees."""

    def __init__(self, args: InnerArgs) -> None:
        super().__init__()
        self.model_type = args.inner.model_type
        self.language_model = args.module.Model(args.inner)
        self._family = args.family

    def __call__(self, inputs: Array, cache: Any = None, input_embeddings: Array | None = None) -> Array:
        """Logits; `input_embeddings` stand in the place of `inputs`."""
        return self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)

    def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
        """Those of the language model, by this network's names.

        Where there is no matrix for logits, that of the embeddings is it.
        """
        found = {_named(name): array for name, array in weights.items() if not self._family.sees_with(name)}
        if not any(name.startswith(_OUTPUT) for name in found):
            self.language_model.args.tie_word_embeddings = True
            self.language_model.pop(_UNTIED)
        own = self.language_model.sanitize(found)
        return {f"language_model.{name}": array for name, array in own.items()}

    @property
    def layers(self) -> Any:
        """Of the language model."""
        return self.language_model.layers

    def make_cache(self) -> Any:
        """Caches of a sequence without tokens."""
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

        return make_prompt_cache(self.language_model)


def _named(name: str) -> str:
    """The name of a tensor within the language model."""
    name = name.removeprefix("model.")
    for prefix in _INNER:
        name = name.removeprefix(prefix)
    return name if name.startswith(_OUTPUT) else f"model.{name.removeprefix('model.')}"


def network_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of a network and of its arguments, by a config: ours for `FAMILIES`, else mlx-lm's."""
    if config.get("model_type") in FAMILIES and isinstance(config.get("text_config"), dict):
        return InnerNetwork, InnerArgs
    found: tuple[Any, Any] = _get_classes(config)
    return found
