"""What a gate asks of this machine: to go on with a request, what it holds for others, states of requests.

Owns the beginnings of prompts that the machine has, as gates name them, and the files in which states come
and go.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from stoker.client.requests.held_prefixes import HeldPrefixes
from stoker.client.requests.record import RequestRecord
from stoker.errors import MachineSetupError, NotReadyError, RequestTooLargeError
from stoker.ipc.commands import ExportState, ImportState
from stoker.ipc.events import Admitted
from stoker.private import make_folder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
    from pathlib import Path

    from stoker.client.requests.stream import StreamEvent
    from stoker.client.supervisor import EngineSupervisor
    from stoker.ipc.commands import Submit
    from stoker.ipc.request import GenerateRequest
    from stoker.settings import EngineSettings

FOLDER_NAME = "moving"
"""Below the cache folder; a file is there while a state comes or goes."""
SUFFIX = ".state"
BUFFER_BYTES = 1 << 20
ABANDONED_S = 600.0
"""Age from which a file is one that was left by a crash."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The state of a request, open to be read."""

    file: BinaryIO
    num_tokens: int
    size_bytes: int


class Handover:
    """See the module.

    Args:
        running: the supervisor; raises NotReadyError before the start.
        stream: runs a request, see `Client.stream`.
        resolve: makes a request one for its model, see `client.resolved`.
        settings: of the engine; a state takes at most `cache_ram_bytes`.
    """

    def __init__(
        self,
        running: Callable[[], EngineSupervisor],
        stream: Callable[[RequestRecord], AsyncGenerator[StreamEvent, None]],
        resolve: Callable[[GenerateRequest], GenerateRequest],
        settings: EngineSettings,
    ) -> None:
        self._running = running
        self._stream = stream
        self._resolve = resolve
        self._folder = settings.cache_dir / FOLDER_NAME
        self._max_bytes = settings.cache_ram_bytes
        self._held = HeldPrefixes()

    def __repr__(self) -> str:
        return f"<Handover {self._held!r}>"

    async def take_over(self, submit: Submit, owner: str, route: str) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request from where another machine left it; as of `Runtime.stream` else.

        Args:
            submit: what was asked for, and what was delivered.
            owner: digest of the API key of the gate that gives it, which is trusted with its grammar.
            route: what it came by.
        """
        record = RequestRecord.handed_over(submit, time.monotonic(), owner, route)
        async with aclosing(self._stream(record)) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    self._held.note(submit.chain, self._running().num_restarts)
                yield event

    def held(self) -> bytes:
        """The newest beginnings that this machine has; `held_prefixes.unpacked` reads them."""
        try:
            return self._held.packed(self._running().num_restarts)
        except NotReadyError:  # nothing was started
            return b""

    # ------------------------------------------------------------ states

    @asynccontextmanager
    async def state_of(self, request_id: str) -> AsyncIterator[StateFile]:
        """What is computed of a live request, to be read while the block runs; the request goes on.

        Raises:
            StateNotFoundError: too little is, or none that another may go on from.
            CacheFileError: it is larger than `cache_ram_bytes`, or cannot be written.
            NotReadyError: no engine serves.
            MachineSetupError: the folder cannot be used.
        """
        path = await asyncio.to_thread(_new_file, self._folder)
        try:
            ask = ExportState(call_id=0, request_id=request_id, path=str(path), max_bytes=self._max_bytes)
            found = await self._running().ask(ask)
            with path.open("rb") as file:
                path.unlink()
                yield StateFile(file, found["num_tokens"], found["size_bytes"])
        finally:
            path.unlink(missing_ok=True)

    async def take_state(self, request: GenerateRequest, parts: AsyncIterable[bytes]) -> int:
        """Store what another machine computed of a request, which is to be taken over next.

        Args:
            request: without its prompt.
            parts: of the state, as `state_of` gave it.

        Returns:
            Tokens of it.

        Raises:
            RequestTooLargeError: it is larger than `cache_ram_bytes`.
            CacheFileError: it is damaged, of another model, or does not fit.
            NotReadyError: the model is not in memory.
            InvalidRequestError: the model has no such adapter.
            MachineSetupError: the folder cannot be used.
        """
        supervisor = self._running()
        request = self._resolve(request)
        path = await asyncio.to_thread(_new_file, self._folder)
        try:
            await self._write(path, parts)
            found = await supervisor.ask(ImportState(call_id=0, request=request, path=str(path)))
        finally:
            path.unlink(missing_ok=True)
        return int(found["num_tokens"])

    async def _write(self, path: Path, parts: AsyncIterable[bytes]) -> None:
        size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=BUFFER_BYTES) as file:
            async for part in parts:
                size += len(part)
                if size > self._max_bytes:
                    text = f"the state has over {self._max_bytes} bytes, what cache_ram_bytes allows here"
                    raise RequestTooLargeError(text, bound=self._max_bytes)
                await asyncio.to_thread(file.write, part)


def _new_file(folder: Path) -> Path:
    """A name in the folder that no file has; those that crashes left are removed."""
    try:
        make_folder(folder)
        now = time.time()
        for left in folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                if now - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()
    except OSError as error:
        text = f"states cannot be moved through {folder}: {error.strerror or error}"
        raise MachineSetupError(text, path=str(folder)) from None
    return folder / f"{secrets.token_hex(16)}{SUFFIX}"
