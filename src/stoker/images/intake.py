"""Images on their way into requests: one is decoded at a time, off the event loop.

Owns the threads and with them the bound on memory: what is decoded is as large as one image may be, however
many requests arrive. Addresses are fetched beside that, a few at once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from stoker.errors import InvalidRequestError, NotReadyError
from stoker.images.image import Image
from stoker.images.limits import DEFAULT_LIMITS, ImageLimits, ImageReport
from stoker.images.sources import Encoded, is_web, read_reference
from stoker.ipc.request import Picture
from stoker.machine.malloc import give_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.images.turns import Given

T = TypeVar("T")

_FETCHES_AT_ONCE = 4
_LARGE_PIXELS = 2**20


@dataclass(frozen=True, slots=True)
class Taken:
    """An image that a request carries, and what was done to it."""

    picture: Picture
    report: ImageReport


class Intake:
    """Takes in the images of requests.

    Attributes:
        limits: what they may cost and where they may come from.
    """

    def __init__(self, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self._decoders = ThreadPoolExecutor(1, "stoker-images")
        self._fetchers = ThreadPoolExecutor(_FETCHES_AT_ONCE, "stoker-fetch")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Intake(edge {self.limits.edge_px} px)"

    async def take(self, given: Sequence[Given]) -> list[Taken]:
        """The images, in their order.

        Raises:
            InvalidRequestError: there are too many, or one is not taken; `param` names it.
            NotReadyError: the program is closing.
        """
        limits = self.limits
        if len(given) > limits.max_images:
            raise InvalidRequestError(
                f"there are {len(given)} pictures, at most {limits.max_images} are taken", param="messages"
            )
        taken = []
        for one in given:
            source: Image | str | Encoded = one.source
            if isinstance(source, str) and is_web(source):
                source = await self._run(self._fetchers, partial(read_reference, source, limits, one.param))
            taken.append(await self._run(self._decoders, partial(_taken, source, limits, one.param)))
        return taken

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """What `work` returns; of work that `close` has ended the error, as its caller was not cancelled."""
        if self._is_closed:
            raise _closing()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise _closing() from None
            raise

    def close(self) -> None:
        """Start nothing more; what is being decoded ends by itself. Waiters get NotReadyError."""
        self._is_closed = True
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)


def _closing() -> NotReadyError:
    return NotReadyError("no more pictures are taken: the program is closing")


def _taken(source: Image | str | Encoded, limits: ImageLimits, param: str) -> Taken:
    is_large = True  # as far as is known
    try:
        if isinstance(source, Image):
            taken = Taken(*source.picture(limits.edge_px, limits))
        else:
            found = read_reference(source, limits, param) if isinstance(source, str) else source
            from stoker.images.decode import decoded  # noqa: PLC0415 - imports Pillow

            taken = Taken(*decoded(found.data, found.declared, limits, param))
        is_large = taken.report.width * taken.report.height > _LARGE_PIXELS
    finally:
        if is_large:
            give_back()  # the C library would keep all that the pixels took
    return taken
