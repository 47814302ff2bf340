"""Which part of a model lies on which device, by its header and a placement (SPEC R11).

Owns the rule by which the bundled llama.cpp deals out layers (`load_tensors` in llama-model.cpp): the input
stays in host memory, the last layers and the output go to devices, in the order of their parts. How much
each part takes is said by the caller. One thing is asked of the library beyond that: tied embeddings, which
are the output's matrix too, are not kept a second time in host memory where a device has everything else.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from stoker.ipc.model import STEPPED, SplitMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.ipc.model import PlacementSpec
    from stoker.models.gguf.header import GgufHeader, TensorInfo

HOST = ""
"""In the place of a device's id: the machine's memory."""
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_INPUTS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_EMBEDDINGS = "token_embd.weight"
_LOOKUP_DEVICES = ("CUDA", "ROCm")
"""Beginnings of the ids of devices whose backend gets rows out of matrices of the types below."""
_LOOKUP_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Weights of one layer: all of them, and those of its experts among them."""

    all_bytes: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Weights of a model by where they can lie, in bytes.

    Attributes:
        layers: one for each layer.
        output_bytes: of what follows the last layer.
        input_bytes: of what comes before the first.
        tied_bytes: of embeddings that are the output's matrix too, counted in both; 0 also where a device
            gets no rows out of a matrix of their type.
        active_part: of the experts of a layer, what one token is computed with, 0 to 1.
    """

    layers: tuple[LayerBytes, ...]
    output_bytes: int
    input_bytes: int
    tied_bytes: int = 0
    active_part: float = 1.0

    @property
    def num_layers(self) -> int:
        """Layers as `gpu_layers` counts them: the output is one."""
        return len(self.layers) + 1

    @property
    def has_experts(self) -> bool:
        """Whether any layer has some."""
        return any(layer.expert_bytes for layer in self.layers)


def read_parts(header: GgufHeader) -> ModelParts:
    """The parts of a model; where its embeddings are its output as well, they count in both."""
    sizes: defaultdict[int, int] = defaultdict(int)
    experts: defaultdict[int, int] = defaultdict(int)
    before = after = 0
    embeddings = readable = 0
    for tensor in header.tensors:
        if block := _BLOCK.search(tensor.name):
            sizes[int(block[1])] += tensor.size_bytes
            experts[int(block[1])] += tensor.size_bytes if is_expert(tensor.name) else 0
        elif tensor.name.startswith(_INPUTS):
            before += tensor.size_bytes
            embeddings += tensor.size_bytes if tensor.name == _EMBEDDINGS else 0
            readable += tensor.size_bytes if _has_readable_rows(tensor) else 0
        else:
            after += tensor.size_bytes
    has_output = any(tensor.name == "output.weight" for tensor in header.tensors)
    is_tied = not has_output and header.model_class in STEPPED
    count = max(header.block_count, max(sizes, default=-1) + 1)
    return ModelParts(
        layers=tuple(LayerBytes(all_bytes=sizes[at], expert_bytes=experts[at]) for at in range(count)),
        output_bytes=after + (0 if has_output else embeddings),
        input_bytes=before,
        tied_bytes=readable if is_tied else 0,
        active_part=_active_part(header),
    )


def _has_readable_rows(tensor: TensorInfo) -> bool:
    return tensor.name == _EMBEDDINGS and tensor.type_name in _LOOKUP_TYPES


def is_expert(name: str) -> bool:
    """Whether a tensor of that name holds experts of which a token needs some."""
    return bool(_EXPERTS.search(name))


def layer_of(name: str) -> int | None:
    """The layer that a tensor of that name belongs to; None: to none."""
    block = _BLOCK.search(name)
    return int(block[1]) if block else None


def _active_part(header: GgufHeader) -> float:
    """By the numbers of the header; 1 where it has none that make sense."""
    count, used = (
        header.metadata.get(f"{header.architecture}.{key}") for key in ("expert_count", "expert_used_count")
    )
    if not isinstance(count, int) or not isinstance(used, int) or not 0 < used <= count:
        return 1.0
    return used / count


def places(placement: PlacementSpec, num_layers: int) -> tuple[str, ...]:
    """Id of the device of each layer, the output last, or `HOST`.

    Args:
        placement: with the ids of its devices and their parts; "auto" counts as all layers.
        num_layers: as `ModelParts.num_layers`.
    """
    given = placement.gpu_layers
    count = min(given, num_layers) if isinstance(given, int) else num_layers
    devices = placement.device if placement.has_devices else ()
    if not devices or not count:
        return (HOST,) * num_layers
    first = num_layers - count
    if placement.split_mode is SplitMode.NONE or len(devices) == 1:
        return (HOST,) * first + (devices[placement.main_gpu or 0],) * count
    parts = placement.tensor_split or (1.0,) * len(devices)
    ends = [end / sum(parts) for end in accumulate(parts)]
    last = len(devices) - 1
    found = (devices[min(last, bisect_right(ends, at / count))] for at in range(count))
    return (HOST,) * first + tuple(found)


def device_of_tied(parts: ModelParts, placement: PlacementSpec) -> str:
    """Id of the device that has all of the model, tied embeddings too; `HOST`: none has."""
    where = set(places(placement, parts.num_layers))
    is_whole = len(where) == 1 and not placement.cpu_moe and 0 < parts.tied_bytes == parts.input_bytes
    device = where.pop()
    return device if is_whole and device.startswith(_LOOKUP_DEVICES) else HOST


def weights_by_device(parts: ModelParts, placement: PlacementSpec) -> Mapping[str, int]:
    """Bytes of weights by id, those in host memory under `HOST`."""
    held: defaultdict[str, int] = defaultdict(int)
    held[HOST] += 0 if device_of_tied(parts, placement) else parts.input_bytes
    where = places(placement, parts.num_layers)
    for at, (layer, device) in enumerate(zip(parts.layers, where[:-1], strict=True)):
        kept = layer.expert_bytes if at < (placement.cpu_moe or 0) else 0
        held[HOST] += kept
        held[device] += layer.all_bytes - kept
    held[where[-1]] += parts.output_bytes
    return held


def host_expert_layers(parts: ModelParts, placement: PlacementSpec) -> frozenset[int]:
    """Layers whose experts host memory holds."""
    where = places(placement, parts.num_layers)[:-1]
    kept = placement.cpu_moe or 0
    return frozenset(at for at, device in enumerate(where) if device == HOST or at < kept)


def host_expert_bytes(parts: ModelParts, placement: PlacementSpec) -> int:
    """Bytes of experts that host memory holds."""
    return sum(parts.layers[at].expert_bytes for at in host_expert_layers(parts, placement))
