"""States of requests on their way between machines: a live one's is written out, another's is taken in.

A state travels as a file of the disk tier, with its checks, and is a stored prefix where it arrives: the
request that follows finds it as it finds any other. Its namespace is without the salt, which each machine
makes of the caller's key; the one that takes it puts it into the namespace of the request that it is for.

Owns the thread that reads and writes the files. A failure costs computing the tokens again, nothing else.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.cache.disk.prefix_file import DamagedError, NewPrefix, PrefixReader, head_of
from stoker.cache.entry import MIN_TOKENS, Entry, EntryState
from stoker.cache.radix import key_of, num_tokens
from stoker.engine.jobs.prepare import namespace_of
from stoker.engine.runners.slots import SlotRunner
from stoker.errors import CacheFileError, NotReadyError, StateNotFoundError, StokerError
from stoker.ipc.commands import ExportState, ImportState
from stoker.ipc.events import Reply
from stoker.kv.sequence import ParkForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.cache.entry import Snapshot
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.runners.turns import Runners
    from stoker.kv.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateRead:
    """Worker's post: a state that came from another machine was read; `problem`: it cannot be used."""

    ask: ImportState
    new: NewPrefix | None = None
    data: bytearray | None = None
    problem: str = ""


class StateMoves:
    """See the module.

    Args:
        post: takes what the thread has done, on that; `take` gets a `StateRead` on the engine's own.
        jobs: the requests.
        runners: the models in memory.
        cache: takes states in.
    """

    def __init__(
        self, post: Callable[[StateRead | Reply], None], jobs: JobTable, runners: Runners, cache: PrefixCache
    ) -> None:
        self._post = post
        self._jobs = jobs
        self._runners = runners
        self._cache = cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stoker-states")

    def __repr__(self) -> str:
        return f"<StateMoves into {self._cache!r}>"

    def close(self) -> None:
        """Wait for what runs, drop what waits. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def take(self, item: ExportState | ImportState | StateRead, now: float) -> None:
        """Begin what is asked for, or go on with what the thread has read; a `Reply` says how it ended."""
        ask = item.ask if isinstance(item, StateRead) else item
        try:
            match item:
                case ExportState():
                    self._export(item, now)
                case ImportState():
                    self._runner_of(item.request.model)
                    self._pool.submit(self._read, item)
                case StateRead():
                    self._take_in(item, now)
        except StokerError as error:
            log.info("no state of a request is moved: %s", error)
            self._jobs.events.append(Reply(call_id=ask.call_id, error=error.info()))

    # ------------------------------------------------------------ out

    def _export(self, ask: ExportState, now: float) -> None:
        job = self._jobs.get(ask.request_id)
        if job is not None and isinstance(job.runner, SlotRunner):
            job.runner.settle(now)  # a step in flight is over: some of its choices may be as well
            job = self._jobs.get(ask.request_id)
        if job is None or not isinstance(job.runner, SlotRunner):
            raise StateNotFoundError(f"nothing is computed of request {ask.request_id!r} here")
        runner = job.runner
        choices = [choice.sequence for choice in job.choices.values()]
        found = [(each, at) for each in choices if (at := _at(each)) is not None]
        if not found:
            raise StateNotFoundError(f"too little is computed of request {ask.request_id!r} here to be moved")
        sequence, place = max(found, key=lambda each: each[0].num_computed)
        size_bytes = runner.scheduler.limits.snapshot_bytes(sequence.num_computed)
        if size_bytes > ask.max_bytes:
            text = f"a state of {sequence.num_computed} tokens has {size_bytes} bytes, over {ask.max_bytes}"
            raise CacheFileError(text, size_bytes=size_bytes, limit_bytes=ask.max_bytes)
        states = runner.backend.extensions.states
        if states is None:
            raise StateNotFoundError(f"{runner.spec.id} gives no states out")
        data: Snapshot = states.export_state(place) if isinstance(place, int) else place
        new = NewPrefix(
            namespace=namespace_of(msgspec.structs.replace(job.request, cache_salt=""), runner.prep),
            model=runner.prep.fingerprint,
            source="",
            tokens=key_of(sequence.tokens[: sequence.num_computed]),
            is_background=sequence.is_background,
            is_exact=not runner.scheduler.limits.can_trim,
        )
        self._pool.submit(self._write, ask, new, data)

    def _write(self, ask: ExportState, new: NewPrefix, data: Snapshot) -> None:
        payload = memoryview(data).cast("B")
        try:
            head = head_of(new, payload)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(ask.path, flags, 0o600), "wb") as file:
                file.write(head)
                file.write(payload)
        except OSError as error:
            text = f"the state cannot be written to {ask.path}: {error.strerror or error}"
            self._post(Reply(call_id=ask.call_id, error=CacheFileError(text).info()))
        else:
            value = {"num_tokens": num_tokens(new.tokens), "size_bytes": len(head) + payload.nbytes}
            self._post(Reply(call_id=ask.call_id, value=value))

    # ------------------------------------------------------------ in

    def _read(self, ask: ImportState) -> None:
        try:
            with PrefixReader(Path(ask.path)) as reader:
                post = StateRead(ask, reader.file, reader.payload())
        except (DamagedError, OSError) as error:
            post = StateRead(ask, problem=str(error))
        self._post(post)

    def _take_in(self, read: StateRead, now: float) -> None:
        """Store a state that was read, if it is what the request can go on from."""
        new, data = read.new, read.data
        if new is None or data is None:
            raise CacheFileError(f"the state cannot be used: {read.problem}")
        runner = self._runner_of(read.ask.request.model)
        if new.model != runner.prep.fingerprint:
            raise CacheFileError(
                "the state is of another file or build of the model, or its states are laid out otherwise"
            )
        if new.namespace != namespace_of(
            msgspec.structs.replace(read.ask.request, cache_salt=""), runner.prep
        ):
            raise CacheFileError("the state was computed with other adapters, or from another initial state")
        source = runner.scheduler.allocator.prefix_source
        if not source.can_store:
            raise CacheFileError(
                "this machine stores no states: cache_ram_bytes is 0, or cache_mode forbids it"
            )
        limits = runner.scheduler.limits
        namespace = namespace_of(read.ask.request, runner.prep)
        entry = self._cache.store(
            Entry(
                namespace=namespace,
                model=limits.model,
                source=limits.source,
                key=new.tokens,
                size_bytes=len(data),
                is_exact=not limits.can_trim,
                is_background=new.is_background,
            ),
            now,
            is_wanted=True,
        )
        if entry is not None:
            self._cache.filled(entry, data, now)
        elif self._cache.index.get(namespace, new.tokens) is None:
            size = len(data)
            raise CacheFileError(
                f"the state of {size} bytes does not fit beside what is in use", size_bytes=size
            )
        value = {"num_tokens": num_tokens(new.tokens)}
        self._jobs.events.append(Reply(call_id=read.ask.call_id, value=value))

    def _runner_of(self, model: str) -> SlotRunner:
        runner = self._runners.find(model)
        if not isinstance(runner, SlotRunner):
            raise NotReadyError(f"{model} is not in memory, or keeps no states")
        return runner


def _at(sequence: Sequence) -> Snapshot | int | None:
    """The state of a sequence, or the slot that has it; None: there is none that another may go on from."""
    if not sequence.shares or sequence.wants_prompt_logits or sequence.num_computed < MIN_TOKENS:
        return None
    if sequence.is_importing:
        return None  # what is computed of it is not in its slot yet
    if sequence.slot is not None:
        return sequence.slot
    if sequence.form is ParkForm.CELLS:
        return sequence.parked_slot
    entry = sequence.entry
    if sequence.form is ParkForm.SNAPSHOT and entry is not None and entry.state is EntryState.RAM:
        return entry.data if entry.num_tokens == sequence.num_computed else None
    return None
