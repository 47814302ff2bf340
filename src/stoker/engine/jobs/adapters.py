"""What a request's adapters are to the engine (SPEC K6): part of how its tokens are computed and kept.

Pure. Short names and scales that were left out are the front's business; which sequences can be computed
together is the backend's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.ipc.request import GenerateRequest


def adapters_of(request: GenerateRequest, fingerprints: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """Name and scale of each, in the order of names.

    Args:
        request: as the front has sealed it.
        fingerprints: of the adapters that the model has, by name.

    Raises:
        InvalidRequestError: the model has no adapter of that name.
    """
    found = {}
    for name, scale in request.adapters:
        if not isinstance(name, str) or scale is None or name not in fingerprints:
            known = ", ".join(fingerprints) or "none"
            text = f"{request.model} has no adapter {name!r}; it has: {known}"
            raise InvalidRequestError(text, param="lora")
        found[name] = scale
    return tuple(sorted(found.items()))


def adapter_key(adapters: tuple[tuple[str, float], ...], fingerprints: Mapping[str, str]) -> str:
    """Names, scales and files: who differs in one of them shares nothing (SPEC C1)."""
    return "\n".join(f"{name}={scale!r}:{fingerprints[name]}" for name, scale in adapters)
