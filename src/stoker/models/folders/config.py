"""What the config.json of a model's folder says, read within bounds (SPEC R1).

A model that also sees or hears keeps the numbers of its language model in `text_config`; they are looked up
there first. Names differ by family: a value is asked for by all that it goes by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.models.folders.json_file import broken

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stoker.errors import ModelFileError

MAX_LAYERS = 512
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 22
_MAX_CONTEXT = 2**31 - 1
_MAX_NAME = 64
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_USUAL = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
}
"""What transformers leaves out of a nested config, by its model_type."""
_SCALINGS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a model are stored.

    Attributes:
        bits: of a weight.
        group_size: weights that share a scale; 0: not said.
        mode: "affine", "mxfp4" and so on, or the method of another library, such as "gptq".
    """

    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def label(self) -> str:
        """As a column shows it: "4-bit", "MXFP4"."""
        return f"{self.bits}-bit" if self.mode == "affine" else self.mode.upper()


@dataclass(frozen=True, slots=True)
class FolderConfig:
    """The config of a folder.

    Attributes:
        path: of config.json, for errors.
        document: all of it.
    """

    path: Path
    document: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """Raises ModelFileError where there is none, or one that cannot be a name."""
        value = self.document.get("model_type")
        if not isinstance(value, str) or not value or len(value) > _MAX_NAME or not value.isprintable():
            raise self.broken(f"model_type is {str(value)[:_MAX_NAME]!r}, a name is needed")
        return value

    @property
    def text(self) -> Mapping[str, Any]:
        """The part that is of the language model, over what stands outside of it."""
        for key in _NESTED:
            part = self.document.get(key)
            if isinstance(part, dict):
                inner = part.get("text_config")  # thinker_config holds another
                usual = _USUAL.get(str(part.get("model_type")), {})
                return {**usual, **self.document, **part, **(inner if isinstance(inner, dict) else {})}
        return self.document

    @property
    def has_vision(self) -> bool:
        """Whether it is a model that also sees or hears."""
        return any(isinstance(self.document.get(key), dict) for key in ("vision_config", "audio_config"))

    def broken(self, reason: str) -> ModelFileError:
        """The error that says what is wrong with it."""
        return broken(self.path, reason)

    def whole(self, *names: str, low: int = 1, high: int = MAX_WIDTH) -> int:
        """A required whole number, under the first of `names` that is there."""
        value = self.optional(*names, low=low, high=high)
        if value is None:
            raise self.broken(f"{' or '.join(names)} is missing")
        return value

    def optional(self, *names: str, low: int = 0, high: int = MAX_WIDTH) -> int | None:
        """Likewise, None where it is missing or null."""
        text = self.text
        for name in names:
            value = text.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                shown = str(value)[:_MAX_NAME]
                raise self.broken(f"{name} is {shown}, a whole number of {low} to {high} is possible")
            return value
        return None

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """A list of `count` texts; empty where it is missing."""
        value = self.text.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.broken(f"{name} is no list of texts")
        if len(value) < count:
            raise self.broken(f"{name} has {len(value)} values for {count} layers")
        return tuple(value[:count])

    @property
    def num_layers(self) -> int:
        """Layers of the language model."""
        return self.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MAX_LAYERS)

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.whole("hidden_size", "d_model", "n_embd", "model_dim", "dim")

    @property
    def n_vocab(self) -> int:
        """Rows of logits, which may be more than the tokenizer has tokens."""
        return self.whole("vocab_size", "padded_vocab_size", high=MAX_VOCABULARY)

    @property
    def context_length(self) -> int:
        """Tokens it was trained for, with what its rope scaling adds; 0: it does not say.

        `max_position_embeddings` is that already, except where the scaling names the shorter training before
        it: then it is a multiple of that one, whichever is longer.
        """
        said = self.optional(*_CONTEXT, low=1, high=_MAX_CONTEXT) or 0
        scaling = next((part for key in _SCALINGS if isinstance(part := self.text.get(key), dict)), None)
        if scaling is None:
            return said
        before = scaling.get("original_max_position_embeddings")
        factor = scaling.get("factor", 1.0)
        for name, value in (("original_max_position_embeddings", before), ("factor", factor)):
            if value is not None and not _is_positive(value):
                raise self.broken(
                    f"rope scaling: {name} is {str(value)[:_MAX_NAME]}, a number above 0 is possible"
                )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "yarn" and before and factor:
            return min(_MAX_CONTEXT, max(said, int(before * factor)))
        return said

    @property
    def quantisation(self) -> Quantisation | None:
        """How its matrices are stored; None: as numbers of the type that their tensors have."""
        for key in ("quantization", "quantization_config"):
            part = self.document.get(key, self.text.get(key))
            if part is None or part is False:
                continue
            if not isinstance(part, dict):
                raise self.broken(f"{key} is no object")
            mode = part.get("quant_method", part.get("mode", "affine"))
            bits: Any = part.get("bits", part.get("num_bits", 4))
            size: Any = part.get("group_size", 0)
            if not isinstance(mode, str) or not mode.isprintable() or len(mode) > _MAX_NAME:
                raise self.broken(f"{key} names no mode")
            if not _is_whole(bits, 1, 16) or not _is_whole(size or 0, 0, 1024):
                raise self.broken(
                    f"{key} has {str(bits)[:_MAX_NAME]} bits in groups of {str(size)[:_MAX_NAME]}"
                )
            return Quantisation(bits, size or 0, mode)
        return None


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
