"""A request as the engine gets it: for one served model, its adapters by name, nothing left to chance.

Refuses what the model cannot do as far as is known without loading it.
"""

from __future__ import annotations

import secrets

import msgspec

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import AdapterSpec, ModelClass, ModelInfo
from stoker.ipc.request import GenerateRequest, StateOutput


def resolved(request: GenerateRequest, info: ModelInfo, max_tokens: int | None) -> GenerateRequest:
    """The request for this model, with a seed, so that a replay draws the same.

    Args:
        request: as it was asked.
        info: of the model that it names.
        max_tokens: what it may have where it does not say; None: until the context is full.

    Raises:
        UnsupportedError: the model is an encoder, and anything but a vector or a score is wanted (SPEC K2).
        InvalidRequestError: the model has no such adapter, or one is named twice.
    """
    if info.model_class == ModelClass.ENCODER and request.state_output not in {
        StateOutput.EMBED,
        StateOutput.SCORE,
    }:
        raise UnsupportedError(
            f"{info.id} is an encoder ({info.architecture}): it embeds texts and generates none",
            param="model",
        )
    sampling = request.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    if request.max_tokens is not None:
        max_tokens = request.max_tokens
    adapters = _adapters(request, info)
    changes = {"model": info.id, "sampling": sampling, "max_tokens": max_tokens, "adapters": adapters}
    return msgspec.structs.replace(request, **changes)


def _adapters(request: GenerateRequest, info: ModelInfo) -> tuple[tuple[str, float], ...]:
    """Adapters by their own names, in the order of names, each with its scale (SPEC K6).

    Where an adapter's name was asked for as a model, that one is among them. One of scale 0 is left out.
    """
    scales = {spec.name: spec.scale for spec in info.adapters if spec.name == info.adapter}
    named: set[str] = set()
    for given, scale in request.adapters:
        spec = _adapter(given, info)
        if spec.name in named:
            raise InvalidRequestError(f"the adapter {spec.name!r} is named twice", param="lora")
        named.add(spec.name)
        scales[spec.name] = spec.scale if scale is None else scale
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale))


def _adapter(given: str | int, info: ModelInfo) -> AdapterSpec:
    if isinstance(given, int):
        found = info.adapters[given : given + 1] if given >= 0 else ()
    else:
        found = tuple(spec for spec in info.adapters if spec.name == given)
    if not found:
        known = ", ".join(spec.name for spec in info.adapters) or "none"
        raise InvalidRequestError(f"{info.id} has no adapter {given!r}; it has: {known}", param="lora")
    return found[0]
