"""Downloads that the running program makes: one for all who want the same, and one that can be stopped.

Owns the thread of each. What is downloaded and how is `stoker.models.hub.hub`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stoker.errors import NotReadyError

if TYPE_CHECKING:
    from pathlib import Path

Moved = Callable[[str, str, float], None]


class _Stopped(Exception):  # noqa: N818 - no error: somebody wants it
    """Ends a pull from inside its progress."""


class _Download:
    """One pull, in a thread that no shutdown waits for."""

    def __init__(self, reference: str, models_dir: Path, on_moved: Callable[[str, float], None]) -> None:
        self._reference = reference
        self._models_dir = models_dir
        self._on_moved = on_moved
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._percent = -1
        self.path: asyncio.Future[Path] = self._loop.create_future()
        self.num_waiting = 0
        threading.Thread(target=self._run, name="stoker-download", daemon=True).start()

    def stop(self) -> None:
        """End it at its next piece; who waits is told now."""
        self._stop.set()
        if not self.path.done():
            text = f"the download of {self._reference} was stopped; what arrived so far is kept"
            self.path.set_exception(NotReadyError(text))
            self.path.exception()  # it may be that nobody waits

    def _run(self) -> None:
        try:
            path = self._pull()
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self._post(partial(self._failed, error))
        else:
            self._post(partial(self._succeeded, path))

    def _pull(self) -> Path:
        from stoker.models.hub.hub import PullRequest, pull  # noqa: PLC0415 - most programs download nothing

        return pull(PullRequest(reference=self._reference, models_dir=self._models_dir), self._progress)

    def _progress(self, num_here: int, num_bytes: int, name: str) -> None:
        if self._stop.is_set():
            raise _Stopped
        percent = 100 * num_here // max(1, num_bytes)
        if percent != self._percent:
            self._percent = percent
            self._post(partial(self._moved, name, percent / 100))

    def _failed(self, error: BaseException) -> None:
        if not self.path.done():
            self.path.set_exception(error)

    def _succeeded(self, path: Path) -> None:
        if not self.path.done():
            self.path.set_result(path)

    def _moved(self, name: str, fraction: float) -> None:
        if not self.path.done():
            self._on_moved(name, fraction)

    def _post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call)


class Downloads:
    """Every download under way, by its reference.

    Args:
        models_dir: where the files come to lie.
        on_moved: called on the event loop with a reference, the file's name and the fraction of it.
    """

    def __init__(self, models_dir: Path, on_moved: Moved) -> None:
        self._models_dir = models_dir
        self._on_moved = on_moved
        self._under_way: dict[str, _Download] = {}

    def __repr__(self) -> str:
        return f"<Downloads {sorted(self._under_way)}>"

    def __contains__(self, reference: str) -> bool:
        return reference in self._under_way

    async def get(self, reference: str) -> Path:
        """Download what a hub reference means; cancelled by the last who waits for it, it is stopped.

        Raises:
            NotReadyError: it was stopped by `stop`.
            StokerError: what `stoker.models.hub.hub.pull` raises.
        """
        download = self._under_way.get(reference)
        if download is None:
            download = _Download(reference, self._models_dir, partial(self._on_moved, reference))
            self._under_way[reference] = download
        download.num_waiting += 1
        try:
            return await asyncio.shield(download.path)
        finally:
            download.num_waiting -= 1
            if download.num_waiting == 0 and self._under_way.get(reference) is download:
                del self._under_way[reference]
                download.stop()

    def stop(self, reference: str) -> None:
        """End a download; one that is not under way is ignored."""
        download = self._under_way.get(reference)
        if download is not None:
            download.stop()

    def close(self) -> None:
        """End all of them."""
        for download in list(self._under_way.values()):
            download.stop()
