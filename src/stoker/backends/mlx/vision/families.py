"""Which folders see on MLX: the families that were tried, and why a folder sees nothing.

Owns what config.json and the tensors say of a tower. Nothing native is loaded: the caller's process describes
and plans models too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.backends.mlx.vision.library import INSTALL, installed_version
from stoker.backends.mlx.vision.views import Views, read_views
from stoker.errors import ModelFileError
from stoker.ipc.model import Pairing

if TYPE_CHECKING:
    from stoker.models.folders.folder import ModelFolder
    from stoker.models.folders.tensors import FolderTensor

_MAX_EDGE = 4096
_MAX_FACTOR = 64
_FLOAT_BYTES = 4
_CHANNELS = 3
_LIVE_COPIES = 12  # of a layer's rows: queries, keys, values, their heads, what goes in and out
_HEAD_WIDTH = 64  # where a config does not say how many heads there are
_TEXTS = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that see, of one kind.

    Attributes:
        module: of mlx-vlm's models that has their classes.
        towers: beginnings of the names of tensors that see.
        is_tiled: pictures are cut into tiles, each with tokens around it.
        texts: types of language models that they may have.
    """

    module: str
    towers: tuple[str, ...]
    is_tiled: bool = False
    texts: tuple[str, ...] = _TEXTS

    def sees_with(self, name: str) -> bool:
        """Whether a tensor is one of the tower or of the projector behind it."""
        return name.removeprefix("model.").startswith(self.towers)


_TILED = ("vision_model.", "connector.")
FAMILIES = {
    "llava": Family("llava", ("vision_tower.", "multi_modal_projector.")),
    "idefics3": Family("idefics3", _TILED, is_tiled=True),
    "smolvlm": Family("smolvlm", _TILED, is_tiled=True),
}
_GRID = "the tokens of its pictures lie in a grid (M-RoPE), which is not computed on MLX"
_MUTUAL = "the tokens of its pictures see each other, which is not computed on MLX"
_REASONS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"), _GRID),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "paligemma"), _MUTUAL),
}


@dataclass(frozen=True, slots=True)
class Sight:
    """How a folder stands with pictures.

    Attributes:
        pairing: as with a projector.
        reason: why it sees nothing, for people; empty: it does, or was never made to.
        views: how pictures become what its tower takes; None: it sees nothing.
    """

    pairing: Pairing
    reason: str = ""
    views: Views | None = None


def sight_of(folder: ModelFolder) -> Sight:
    """How a folder stands with pictures here. Loads nothing, raises nothing that one may not see for."""
    if not folder.settings.has_vision:
        return Sight(Pairing.NONE)
    if missing := _missing(folder):
        return Sight(Pairing.TEXT_ONLY, missing)
    if not tower_tensors(folder):
        return Sight(Pairing.NEEDS_PROJECTOR, "its folder holds no weights of a tower that sees")
    try:
        return Sight(Pairing.READY, views=read_views(folder.path, TowerShape.of(folder)))
    except ModelFileError as error:
        reason = error.message.replace(str(folder.path), folder.path.name)  # strangers read it too
        return Sight(Pairing.BROKEN, reason)


def _missing(folder: ModelFolder) -> str:
    """What is not there to see with a folder of this kind; empty: everything is."""
    name, text = folder.architecture, text_type(folder.config)
    if name not in FAMILIES:
        usual = f"pictures are computed on MLX for models of type {', '.join(FAMILIES)}, not of {name}"
        return _REASONS.get(name, usual)
    if text not in FAMILIES[name].texts:
        return f"{name} with a language model of type {text} was not tried on MLX"
    return "" if installed_version() else f"mlx-vlm is not installed: {INSTALL}"


def text_type(config: Any) -> str:
    """model_type of the language model inside of a model that sees; llama's where it is not said."""
    part = config.get("text_config")
    return str(part.get("model_type", "llama")) if isinstance(part, dict) else "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """A tower by its config.

    Attributes:
        edge: of the square that it takes, in pixels.
        patch: edge of a patch.
        num_tokens: that a square becomes.
        is_tiled: as in `Family`.
    """

    edge: int
    patch: int
    num_tokens: int
    is_tiled: bool

    @classmethod
    def of(cls, folder: ModelFolder) -> TowerShape:
        """That of a folder of one of `FAMILIES`. Raises ModelFileError."""
        family, vision = FAMILIES[folder.architecture], folder.config.get("vision_config")
        if not isinstance(vision, dict):
            raise folder.settings.broken("vision_config is missing")
        edge = _whole(folder, vision, "image_size", _MAX_EDGE)
        patch = _whole(folder, vision, "patch_size", edge)
        side = edge // patch
        if not family.is_tiled:
            return cls(edge=edge, patch=patch, num_tokens=_whole_picture(folder, side**2), is_tiled=False)
        factor = _whole(folder, {"scale_factor": 2, **folder.config}, "scale_factor", _MAX_FACTOR)
        if side % factor:
            text = f"a square of {side} patches a side cannot be shrunk by {factor} (scale_factor)"
            raise folder.settings.broken(text)
        return cls(edge=edge, patch=patch, num_tokens=(side // factor) ** 2, is_tiled=True)


def _whole_picture(folder: ModelFolder, num_patches: int) -> int:
    """Tokens of a picture that is taken whole: its patches, perhaps with the one that stands for all."""
    config, vision = folder.config, folder.config["vision_config"]
    layer, strategy = config.get("vision_feature_layer", -2), config.get("vision_feature_select_strategy")
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise folder.settings.broken(f"vision_feature_layer is {str(layer)[:32]}, one layer can be taken")
    if strategy not in {None, "default", "full"}:
        text = f"vision_feature_select_strategy is {str(strategy)[:32]!r}, 'default' and 'full' are known"
        raise folder.settings.broken(text)
    drops_first = strategy != "full"
    has_class = vision.get("model_type") == "clip_vision_model"
    return num_patches + int(has_class) - int(drops_first)


def _whole(folder: ModelFolder, part: Any, name: str, high: int) -> int:
    value = part.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        text = f"{name} is {str(value)[:32]}, a whole number of 1 to {high} is possible"
        raise folder.settings.broken(text)
    return int(value)


def tower_tensors(folder: ModelFolder) -> dict[str, FolderTensor]:
    """The tensors that see, by their names in the folder; empty: there are none that are used."""
    family = FAMILIES.get(folder.architecture)
    if family is None:
        return {}
    return {name: each for name, each in folder.tensors.items() if family.sees_with(name)}


def projector_bytes(folder: ModelFolder) -> int:
    """What a folder's tower takes, with what it computes in; 0: it sees nothing."""
    if sight_of(folder).pairing is not Pairing.READY:
        return 0
    tensors, shape = tower_tensors(folder), TowerShape.of(folder)
    patches = (shape.edge // shape.patch) ** 2 + 1
    width = max((each.shape[0] for name, each in tensors.items() if "patch_embedding" in name), default=0)
    wide = max((each.shape[0] for name, each in tensors.items() if name.endswith("fc1.weight")), default=0)
    said = folder.config["vision_config"].get("num_attention_heads")
    heads = said if isinstance(said, int) and 0 < said <= max(1, width) else math.ceil(width / _HEAD_WIDTH)
    work = (
        patches * (_LIVE_COPIES * width + 2 * wide) + 2 * heads * patches**2 + 2 * _CHANNELS * shape.edge**2
    )
    return sum(each.size_bytes for each in tensors.values()) + work * _FLOAT_BYTES
