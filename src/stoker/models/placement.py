"""Where a model is to lie: what a caller gives of that, and which devices it means (SPEC R11).

Owns how devices are named: by index, by id or by name, as `stoker doctor` shows them. Where layers then go is
`memory_estimate.placing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stoker.backends.device import CPU
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import NO_DEVICE, FlashAttention, KVLayout, SplitMode
from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stoker.backends.device import Device
    from stoker.ipc.model import ModelSpec, PlacementSpec

QUANTISED = frozenset({"q8_0", "q4_0"})
"""Types of cells that are stored in blocks with a common scale."""
PlacementChanges = Mapping[str, Any]
"""What is given of where a model lies, by the names of `PlacementSettings`."""


def placed(spec: ModelSpec, changes: PlacementChanges) -> ModelSpec:
    """The spec with these changes; its backend is chosen before (docs/adr/0032)."""
    given = dict(changes)
    given.pop("backend", None)
    kv_type = given.pop("kv_type", spec.kv_type) or ""
    kv_layout = KVLayout(given.pop("kv_layout", spec.kv_layout))
    flash_attention = FlashAttention(given.pop("flash_attention", spec.flash_attention))
    if mode := given.get("split_mode"):
        given["split_mode"] = SplitMode(mode)
    cells = {"kv_type": kv_type, "kv_layout": kv_layout, "flash_attention": flash_attention}
    return replace(spec, **cells, placement=replace(spec.placement, **given))


def check_attention(spec: ModelSpec) -> None:
    """Raises UnsupportedError for quantised cells where flash attention, which alone reads such, is off."""
    if spec.flash_attention is FlashAttention.OFF and spec.kv_type in QUANTISED:
        needs = f"flash_attention is off, and kv_type {spec.kv_type} needs it"
        raise UnsupportedError(
            f"{spec.id}: {needs}: set it to auto, or kv_type to f16", param="flash_attention"
        )


def chosen_devices(placement: PlacementSpec, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The accelerators among `devices` that a placement means, in its order; none: the CPU computes.

    Raises:
        InvalidRequestError: it names one that is not there, says how more or fewer are to share a model than
            there are, or one of them twice; details carry `devices`, the ids of those that there are.
    """
    there = tuple(device for device in devices if device.kind != CPU.kind)
    if not placement.has_devices:
        return ()
    found = tuple(_named(name, there) for name in placement.device) or there
    ids = [device.id for device in found]
    if len(set(ids)) < len(ids):
        raise _refusal("device", f"one is named twice: {', '.join(placement.device)}", there)
    if found and placement.main_gpu is not None and placement.main_gpu >= len(found):
        text = f"{placement.main_gpu} is no index among {count_text(len(found), 'device')}"
        raise _refusal("main_gpu", text, there)
    parts = len(placement.tensor_split)
    if parts not in {0, len(found)} and len(found) > 1 and placement.split_mode is not SplitMode.NONE:
        raise _refusal("tensor_split", f"{parts} parts for {count_text(len(found), 'device')}", there)
    return found


def with_device_ids(spec: ModelSpec, devices: Sequence[Device], lost: Collection[str] = ()) -> ModelSpec:
    """The spec with its devices by their ids.

    Raises:
        InvalidRequestError: as `chosen_devices`, but not for what was lost; or where one of its settings has
            several devices share the model and another would be ignored for that.
    """
    left = tuple(name for name in spec.placement.device if name not in lost)
    is_changed = left != spec.placement.device
    placement = replace(spec.placement, device=left or (NO_DEVICE,)) if is_changed else spec.placement
    if lost:  # which were of them
        placement = replace(placement, tensor_split=(), main_gpu=None)
    found = chosen_devices(placement, devices)
    if len(found) > 1:
        _check_shares(placement, devices)
    ids = tuple(device.id for device in found)
    return replace(spec, placement=replace(placement, device=ids or (NO_DEVICE,)))


def _check_shares(asked: PlacementSpec, devices: Sequence[Device]) -> None:
    """Refuse what would be ignored of how several devices are to share a model."""
    mode, has_main = asked.split_mode, asked.main_gpu is not None
    if mode is SplitMode.LAYER and has_main:
        ignored, text = "main_gpu", "with split_mode layer no device holds all of the model"
    elif asked.tensor_split and (mode is SplitMode.NONE or (mode is None and has_main)):
        why = "main_gpu" if mode is None else "split_mode none"
        ignored, text = "tensor_split", f"with {why} one device holds all of the model"
    else:
        return
    there = tuple(device for device in devices if device.kind != CPU.kind)
    raise _refusal(ignored, f"{text}; leave out one of the two", there)


def without_devices(asked: ModelSpec, found: ModelSpec) -> tuple[str, ...]:
    """What a model gets less of whose layers were to lie on devices where there are none, for people.

    Args:
        asked: as it was given.
        found: the same with its devices by their ids.
    """
    asks = asked.placement.gpu_layers != "auto" and asked.placement.has_devices
    return (
        ("on the CPU: there is no device for its layers",) if asks and not found.placement.has_devices else ()
    )


def _named(name: str, there: Sequence[Device]) -> Device:
    if name.isdecimal() and int(name) < len(there):
        return there[int(name)]
    wanted = name.casefold()
    by_id = [device for device in there if device.id.casefold() == wanted]
    by_name = [device for device in there if wanted in {device.name.casefold(), device.label.casefold()}]
    found = by_id or by_name
    if len(found) == 1:
        return found[0]
    what = f"several are called {name!r}" if found else f"there is no {name!r} here"
    raise _refusal("device", what, there)


def _refusal(param: str, what: str, there: Sequence[Device]) -> InvalidRequestError:
    known = [f"{at} {device.id} ({device.name})" for at, device in enumerate(there)]
    text = f"there are {', '.join([*known, NO_DEVICE])}" if known else f"there is the CPU alone ({NO_DEVICE})"
    return InvalidRequestError(f"{param}: {what}; {text}", param=param, devices=[each.id for each in there])
