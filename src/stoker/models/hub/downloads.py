"""Downloads that the running program makes: one for all who want the same, and one that can be stopped.

Owns the thread of each, and which files a reference such as `owner/repo:Q4_K_M` means. `hub` downloads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError, ModelNotFoundError, NotReadyError
from stoker.models.shards import shard_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# First match wins: good for its size first, then the safe larger ones, then whatever there is.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_", "IQ4_", "Q5_K_M", "Q5_", "Q6_K", "Q8_0", "F16", "BF16")
# A projector, an importance matrix or a draft head is no model of its own.
_COMPANION = re.compile(r"(^|[/._-])(mmproj|imatrix|mtp|vocab)([._-]|$)", re.IGNORECASE)
_NAMES_SHOWN = 8
FOLDER_CONFIG = "config.json"
_FOLDERS = {
    "safetensors": (
        "model*.safetensors",
        ("model*.safetensors", "*.json", "*.jinja", "*.tiktoken", "*.txt", "tokenizer.model"),
    ),
    "mnn": ("llm.mnn", ("*.mnn", "*.weight", "*.json", "*.jinja", "*.txt", "*.mtok", "*.bin")),
}
"""Models that are folders: what selects each, by what a repository is known to have one, and its files."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository; `selector` is a file name, a quantisation, a kind of folder, or empty: what suits."""

    repo: str
    selector: str = ""

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read `REPO`, `REPO:FILE`, `REPO:QUANT`, `REPO:safetensors`. Raises InvalidRequestError."""
        repo, _, selector = text.strip().partition(":")
        if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
            raise InvalidRequestError(
                f"{text[:200]!r} is no model reference; write OWNER/REPO[:FILE] or OWNER/REPO:Q4_K_M"
            )
        if selector:
            check_file_name(selector)
        return cls(repo, selector)

    def choose(self, names: Sequence[str]) -> tuple[str, ...]:
        """The files to get out of a repository's, all shards of a split model, the first one first.

        Of a model that is a folder they are all its files; the last is config.json, without which it is none.

        Raises:
            ModelNotFoundError: there is no such file; lists what there is.
        """
        if whole := self._folder(names):
            return whole
        files = sorted(name for name in names if name.lower().endswith(".gguf"))
        chosen = self._pick(files)
        if chosen is None:
            shown = ", ".join(files[:_NAMES_SHOWN]) + (", ..." if len(files) > _NAMES_SHOWN else "")
            wanted = f"no GGUF file that matches {self.selector!r}" if self.selector else "no GGUF file"
            text = (
                f"{self.repo} has {wanted} and no folder of safetensors; GGUF files: {shown or 'none at all'}"
            )
            raise ModelNotFoundError(text, repo=self.repo)
        folder, slash, name = chosen.rpartition("/")
        shards = tuple(folder + slash + each for each in shard_names(name))
        missing = [each for each in shards if each not in files]
        if missing:
            raise ModelNotFoundError(f"{self.repo} lacks the shard {missing[0]}", repo=self.repo)
        return shards

    def _folder(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of a model that is a folder; none where the repository has none, or another is meant."""
        wanted = self.selector.casefold()
        if wanted not in _FOLDERS and (wanted or any(name.lower().endswith(".gguf") for name in names)):
            return ()
        here = sorted(name for name in names if "/" not in name)
        for kind, (sign, files) in _FOLDERS.items():
            is_one = FOLDER_CONFIG in here and any(fnmatchcase(name, sign) for name in here)
            if is_one and wanted in {"", kind}:
                kept = [name for name in here if any(fnmatchcase(name, file) for file in files)]
                return *(name for name in kept if name != FOLDER_CONFIG), FOLDER_CONFIG
        return ()

    def _pick(self, files: list[str]) -> str | None:
        folded = {name.casefold(): name for name in files}
        wanted = self.selector.casefold()
        if wanted in folded:
            return folded[wanted]
        models = [name for name in files if not _COMPANION.search(name)]
        if self.selector:
            by_name = [name for name in files if name.rpartition("/")[2].casefold() == wanted]
            return next(
                iter(by_name or [name for name in models if _is_quantised(name, self.selector)]), None
            )
        for label in _PREFERRED:
            for name in models:
                if _is_quantised(name, label):
                    return name
        return models[0] if models else None


def check_file_name(name: str) -> None:
    """Raise InvalidRequestError for a name that would leave the folder it is put in."""
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise InvalidRequestError(f"{name[:200]!r} is no file name inside a repository")


def _is_quantised(name: str, label: str) -> bool:
    tail = "" if label.endswith("_") else r"(?![A-Za-z0-9_])"
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(label)}{tail}", name, re.IGNORECASE) is not None


def is_reference(text: str) -> bool:
    """Whether a text could name a repository of the hub."""
    try:
        HubReference.parse(text)
    except InvalidRequestError:
        return False
    return True


Moved = Callable[[str, str, float, int], None]


class _Stopped(Exception):  # noqa: N818 - no error: it was asked for
    """Ends a pull from inside its progress."""


class _Download:
    """One pull, in a thread that no shutdown waits for."""

    def __init__(self, reference: str, models_dir: Path, on_moved: Callable[[str, float, int], None]) -> None:
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
        """End it at its next piece; those that wait get NotReadyError now."""
        self._stop.set()
        if not self.path.done():
            text = f"the download of {self._reference} was stopped; what arrived so far is kept"
            self.path.set_exception(NotReadyError(text))
            self.path.exception()  # it may never be awaited

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
            self._post(partial(self._moved, name, percent / 100, num_bytes))

    def _failed(self, error: BaseException) -> None:
        if not self.path.done():
            self.path.set_exception(error)

    def _succeeded(self, path: Path) -> None:
        if not self.path.done():
            self.path.set_result(path)

    def _moved(self, name: str, fraction: float, num_bytes: int) -> None:
        if not self.path.done():
            self._on_moved(name, fraction, num_bytes)

    def _post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(call)


class Downloads:
    """Every download under way, by its reference.

    Args:
        models_dir: where the files come to lie.
        on_moved: called on the event loop with a reference, the file's name, the fraction of it that is here
            and its bytes.
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
        """Download what a hub reference means; cancelled by the last call that waits for it, it is stopped.

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
