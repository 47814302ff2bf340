"""Images and recordings on their way into requests: one is decoded at a time, off the event loop.

Owns the threads and with them the bound on memory: what is decoded is as large as one image or recording may
be, however many requests arrive. Addresses are fetched beside that, a few at once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from stoker.audio.audio import Audio, bytes_of_base64
from stoker.audio.limits import DEFAULT_LIMITS as DEFAULT_AUDIO_LIMITS
from stoker.audio.limits import AudioLimits, AudioReport
from stoker.errors import InvalidRequestError, NotReadyError
from stoker.images.image import Image
from stoker.images.limits import DEFAULT_LIMITS, ImageLimits, ImageReport
from stoker.images.sources import Encoded, is_web, read_reference
from stoker.images.turns import Recording
from stoker.ipc.request import Medium, Sound
from stoker.machine.malloc import give_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stoker.images.turns import Given

T = TypeVar("T")

_FETCHES_AT_ONCE = 4
_LARGE_PIXELS = 2**20


@dataclass(frozen=True, slots=True)
class Taken:
    """An image or a recording that a request carries, and what was done to it."""

    picture: Medium
    report: ImageReport | AudioReport


def image_reports(taken: Iterable[Taken]) -> tuple[ImageReport, ...]:
    """What was done to each image among them."""
    return tuple(one.report for one in taken if isinstance(one.report, ImageReport))


class Intake:
    """Takes in the images and recordings of requests.

    Attributes:
        limits: what images may cost and where they may come from.
        audio_limits: what recordings may cost.
    """

    def __init__(
        self, limits: ImageLimits = DEFAULT_LIMITS, audio_limits: AudioLimits = DEFAULT_AUDIO_LIMITS
    ) -> None:
        self.limits = limits
        self.audio_limits = audio_limits
        self._decoders = ThreadPoolExecutor(1, "stoker-images")
        self._fetchers = ThreadPoolExecutor(_FETCHES_AT_ONCE, "stoker-fetch")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Intake(edge {self.limits.edge_px} px)"

    async def take(self, given: Sequence[Given]) -> list[Taken]:
        """The images and recordings, in their order.

        Raises:
            InvalidRequestError: there are too many, or one is not taken; `param` names it.
            UnsupportedError: a recording is of a format that is not taken here.
            NotReadyError: the program is closing.
        """
        limits = self.limits
        self._check_numbers(given)
        taken: list[Taken] = []
        for one in given:
            source: Image | str | Recording | Encoded = one.source
            if isinstance(source, Recording):
                left = self._left(taken)
                taken.append(await self._run(self._decoders, partial(_heard, source, left, one.param)))
                continue
            if isinstance(source, str) and is_web(source):
                source = await self._run(self._fetchers, partial(read_reference, source, limits, one.param))
            taken.append(await self._run(self._decoders, partial(_taken, source, limits, one.param)))
        return taken

    def _check_numbers(self, given: Sequence[Given]) -> None:
        num_recordings = sum(isinstance(one.source, Recording) for one in given)
        for num, most, what in (
            (len(given) - num_recordings, self.limits.max_images, "pictures"),
            (num_recordings, self.audio_limits.max_recordings, "recordings"),
        ):
            if num > most:
                raise InvalidRequestError(
                    f"there are {num} {what}, at most {most} are taken", param="messages"
                )

    def check_sounds(self, sounds: Sequence[Sound]) -> None:
        """Raises InvalidRequestError where decoded recordings are over the bounds of a request's."""
        num, most = len(sounds), self.audio_limits.max_recordings
        if num > most:
            raise InvalidRequestError(
                f"there are {num} recordings, at most {most} are taken", param="pictures"
            )
        duration_s = sum(sound.duration_s for sound in sounds)
        if duration_s > self.audio_limits.max_s:
            most = self.audio_limits.max_s
            text = f"the recordings have {duration_s:.1f} s, {most} s are taken in one request"
            raise InvalidRequestError(text, param="pictures")

    def _left(self, taken: Iterable[Taken]) -> AudioLimits:
        """The bounds of the next recording: seconds are those of all together."""
        used_s = sum(one.picture.duration_s for one in taken if isinstance(one.picture, Sound))
        return replace(self.audio_limits, used_s=used_s)

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
    return NotReadyError("no more pictures and recordings are taken: the program is closing")


def _heard(recording: Recording, limits: AudioLimits, param: str) -> Taken:
    source = recording.source
    try:
        if isinstance(source, Audio):
            return Taken(*source.sound(recording.rate_hz, limits))
        from stoker.audio.decode import decoded  # noqa: PLC0415 - imports numpy

        data = bytes_of_base64(source, limits, param)
        return Taken(*decoded(data, limits, recording.rate_hz, param))
    finally:
        give_back()


def _taken(source: Image | str | Encoded, limits: ImageLimits, param: str) -> Taken:
    is_large = True  # as far as is known
    try:
        if isinstance(source, Image):
            picture, report = source.picture(limits.edge_px, limits)
        else:
            found = read_reference(source, limits, param) if isinstance(source, str) else source
            from stoker.images.decode import decoded  # noqa: PLC0415 - imports Pillow

            picture, report = decoded(found.data, found.declared, limits, param)
        is_large = report.width * report.height > _LARGE_PIXELS
    finally:
        if is_large:
            give_back()  # the C library would keep all that the pixels took
    return Taken(picture, report)
