"""Requests from the loose fields of a Python call, checked like a stranger's.

Owns what may be written short: fields of `Sampling` beside those of the request, one stop string as a
string. What the fields mean and which values they take is `stoker.request`'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.errors import InvalidRequestError
from stoker.request import GenerateRequest, Sampling


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
