"""Requests from the loose fields of a Python call, checked like a stranger's.

Owns what may be written short: fields of `Sampling` beside those of the request, one stop string as a
string, an adapter by its name alone. What the fields mean and which values they take is `ipc.request`'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stoker.errors import InvalidRequestError
from stoker.ipc.model import AdapterSpec, ModelInfo
from stoker.ipc.request import GenerateRequest, Sampling


def request_of(prompt: str | Sequence[int] | GenerateRequest, fields: dict[str, Any]) -> GenerateRequest:
    """A request for `prompt`, or the given one with `fields` changed.

    Raises:
        InvalidRequestError: a name is unknown, a type wrong or a value out of range.
    """
    if isinstance(prompt, GenerateRequest):
        if not fields:
            return prompt
        given = msgspec.to_builtins(prompt)
    else:
        given = {"prompt": prompt if isinstance(prompt, str) else tuple(prompt)}
    known = {*GenerateRequest.__struct_fields__, *Sampling.__struct_fields__}
    if unknown := sorted(fields.keys() - known):
        raise InvalidRequestError(f"a request has no field {unknown[0]!r}", param=unknown[0])
    sampling = dict(msgspec.to_builtins(fields.pop("sampling", given.get("sampling", {}))))
    for name in fields.keys() & set(Sampling.__struct_fields__):
        sampling[name] = fields.pop(name)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    match fields.get("adapters"):
        case str(name):
            fields["adapters"] = ((name, None),)
        case Mapping() as scales:
            fields["adapters"] = tuple(scales.items())
    try:
        return msgspec.convert({**given, **fields, "sampling": sampling}, GenerateRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the request is malformed: {error}") from error


def sealed(request: GenerateRequest, model: str, max_tokens: int | None = None) -> GenerateRequest:
    """The request for the model of that id with nothing left to chance, so that a replay draws the same.

    Where it does not say how many tokens it may have, it is `max_tokens`.
    """
    sampling = request.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    if request.max_tokens is not None:
        max_tokens = request.max_tokens
    return msgspec.structs.replace(request, model=model, sampling=sampling, max_tokens=max_tokens)


def adapted(request: GenerateRequest, info: ModelInfo) -> GenerateRequest:
    """The request with its adapters by their own names, in the order of names, each with its scale (SPEC K6).

    Where an adapter's name was asked for as a model, that one is among them. One of scale 0 is left out.

    Raises:
        InvalidRequestError: the model has no such adapter, or one is named twice.
    """
    scales = {spec.name: spec.scale for spec in info.adapters if spec.name == info.adapter}
    named: set[str] = set()
    for given, scale in request.adapters:
        spec = _adapter(given, info)
        if spec.name in named:
            raise InvalidRequestError(f"the adapter {spec.name!r} is named twice", param="lora")
        named.add(spec.name)
        scales[spec.name] = spec.scale if scale is None else scale
    adapters = tuple(sorted((name, scale) for name, scale in scales.items() if scale))
    return msgspec.structs.replace(request, adapters=adapters)


def _adapter(given: str | int, info: ModelInfo) -> AdapterSpec:
    if isinstance(given, int):
        found = info.adapters[given : given + 1] if given >= 0 else ()
    else:
        found = tuple(spec for spec in info.adapters if spec.name == given)
    if not found:
        known = ", ".join(spec.name for spec in info.adapters) or "none"
        raise InvalidRequestError(f"{info.id} has no adapter {given!r}; it has: {known}", param="lora")
    return found[0]
