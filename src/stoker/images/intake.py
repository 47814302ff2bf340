"""Pictures on their way into requests: one is decoded at a time, off the event loop.

Owns the threads and with them the bound on memory: what is decoded is as large as one picture may be, however
many requests arrive. Addresses are fetched beside that, a few at once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError
from stoker.images.decode import ImageReport, decoded
from stoker.images.image import Image
from stoker.images.limits import DEFAULT_LIMITS, ImageLimits
from stoker.images.sources import Encoded, is_web, read_reference
from stoker.memory.allocator import give_back
from stoker.request import Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.images.turns import Given

_FETCHES_AT_ONCE = 4
_LARGE_PIXELS = 2**20


@dataclass(frozen=True, slots=True)
class Taken:
    """A picture that a request carries, and what was done to it."""

    picture: Picture
    report: ImageReport


class Intake:
    """Takes in the pictures of requests.

    Attributes:
        limits: what they may cost and where they may come from.
    """

    def __init__(self, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self._darkroom = ThreadPoolExecutor(1, "stoker-images")
        self._fetchers = ThreadPoolExecutor(_FETCHES_AT_ONCE, "stoker-fetch")

    def __repr__(self) -> str:
        return f"Intake(edge {self.limits.edge_px} px)"

    async def take(self, given: Sequence[Given]) -> list[Taken]:
        """The pictures, in their order.

        Raises:
            InvalidRequestError: there are too many, or one is not taken; `param` names it.
        """
        limits = self.limits
        if len(given) > limits.max_images:
            raise InvalidRequestError(
                f"there are {len(given)} pictures, at most {limits.max_images} are taken", param="messages"
            )
        loop = asyncio.get_running_loop()
        taken = []
        for one in given:
            source: Image | str | Encoded = one.source
            if isinstance(source, str) and is_web(source):
                source = await loop.run_in_executor(self._fetchers, read_reference, source, limits, one.param)
            taken.append(await loop.run_in_executor(self._darkroom, _taken, source, limits, one.param))
        return taken

    def close(self) -> None:
        """Start nothing more; what is being decoded ends by itself."""
        self._darkroom.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)


def _taken(source: Image | str | Encoded, limits: ImageLimits, param: str) -> Taken:
    is_large = True  # as far as is known
    try:
        if isinstance(source, Image):
            taken = Taken(*source.picture(limits.edge_px, limits))
        else:
            found = read_reference(source, limits, param) if isinstance(source, str) else source
            taken = Taken(*decoded(found.data, found.declared, limits, param))
        is_large = taken.report.width * taken.report.height > _LARGE_PIXELS
    finally:
        if is_large:
            give_back()  # the C library would keep all that the pixels took
    return taken
