"""One run: which server has the card when, which rows it gets, and what was left out for want of time."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench.client import Client, Completion
from bench.crowd_client import read_crowd
from bench.device.contestants import (
    LIMIT,
    PEER,
    PEER_ON_DEVICE,
    STOKER,
    DeviceShape,
    GateOnDevices,
    LlamaOnDevice,
    Programs,
    StokerOnDevice,
)
from bench.device.limits import measure_limits
from bench.device.lines import Line, Lines
from bench.device.rows import LONG_TIMES, Crowd, Served, crowd_name, long_crowd, rows_of_crowd, rows_of_few
from bench.errors import BenchError
from bench.machine import describe_machine
from bench.peers import ServerProcess, Shape
from bench.prompts import random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rich.console import Console

    from bench.device.rows import Row, Sizes
    from bench.peers import Server

FEW_SLOTS = 8
"""Of the server whose slots are all taken by background streams."""
PAIR_STREAMS = 32
GATE_TIMES = 8
"""A crowd before a gate has twice as many streams as a server has slots, so that one server alone takes them
in two halves: they write for so many times longer that how they begin is little of it."""
WARM_TOKENS = 8
START_LIMIT_S = 90.0
ROW_LIMIT_S = 120.0
"""Time on a card is dear: a server that hangs costs no more than this."""
TWO_DEVICES = frozenset({"split", "pair", "gate"})
"""Rows for two cards, measured only where they are named."""
READ_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure.

    Attributes:
        models: GGUF files, each alone.
        only: groups of rows; empty: all that take one card.
        servers: out of `contestants.SERVERS`.
        stoker_flags: further flags of `stoker serve`.
        repeat: rounds; each starts every server anew.
        budget_s: after so many seconds nothing more begins.
    """

    models: tuple[Path, ...]
    programs: Programs
    sizes: Sizes
    shape: DeviceShape
    only: frozenset[str] = frozenset()
    servers: frozenset[str] = frozenset({LIMIT, PEER, PEER_ON_DEVICE, STOKER})
    stoker_flags: tuple[str, ...] = ()
    repeat: int = 1
    budget_s: float = 600.0

    def wants(self, row: str) -> bool:
        """Whether that row is to be measured."""
        group = row.partition("-")[0]
        return group in self.only if self.only else group not in TWO_DEVICES


@dataclass(slots=True)
class DeviceSession:
    """Runs an order.

    Attributes:
        left_out: what is not measured, and why.
    """

    order: Order
    lines: Lines
    console: Console
    left_out: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self._began_s > self.order.budget_s

    async def run(self) -> None:
        """Every round, every model, every server in its turn; what fails is a line of its own."""
        self.lines.add(Line(facts={**describe_machine(), **await asyncio.to_thread(device_facts)}))
        with tempfile.TemporaryDirectory(prefix="bench-device-") as folder:
            for model in self.order.models:
                size_bytes = await asyncio.to_thread(_read_whole, model)
                self.lines.add(Line(model=model.name, row="file", values={"size_bytes": size_bytes}))
            for round_ in range(1, self.order.repeat + 1):
                for model in self.order.models:
                    await self._round(model, round_, Path(folder))

    async def _round(self, model: Path, round_: int, folder: Path) -> None:
        order, programs = self.order, self.order.programs
        rows = [row for row in rows_of_crowd(order.sizes) if order.wants(row.name)]
        if LIMIT in order.servers and order.wants(LIMIT):
            await self._limits(model, round_)
        if programs.server is not None:
            for label, flags in ((PEER, ()), (PEER_ON_DEVICE, ("--backend-sampling",))):
                if label in order.servers and (rows or order.wants("start")):
                    peer = LlamaOnDevice(programs.server, model, order.shape, flags)
                    await self._turn(_Turn(label, peer, model, round_, folder), rows, "start")
        if STOKER in order.servers:
            await self._stoker(_Turn(STOKER, None, model, round_, folder), rows)

    async def _stoker(self, turn: _Turn, rows: Sequence[Row]) -> None:
        order, cache, model = self.order, turn.folder / "cache", turn.model
        if order.wants("long"):
            rows = [*rows, long_crowd(order.sizes)]
        if rows or order.wants("start"):
            server = StokerOnDevice((model,), order.shape, cache, order.stoker_flags)
            await self._turn(turn.by(server), rows, "start")
        few = [row for row in rows_of_few() if order.wants(row.name)]
        shape = DeviceShape(FEW_SLOTS, order.shape.ctx_slot)
        if few:
            server = StokerOnDevice((model,), shape, cache, order.stoker_flags)
            await self._turn(turn.by(server), few, "again")
        if "split" in order.only:
            flags = (*order.stoker_flags, "--split-mode", "layer")
            num_tokens = order.sizes.num_tokens
            split = [Crowd(f"split-{crowd_name(num)}", num, num_tokens) for num in (1, FEW_SLOTS)]
            await self._turn(turn.by(StokerOnDevice((model,), shape, cache, flags)), split, "split-start")
        if "pair" in order.only:
            await self._pair(turn, cache)
        if "gate" in order.only:
            await self._gate(turn)

    async def _pair(self, turn: _Turn, cache: Path) -> None:
        """One model on one card, then one server with a model on each of two."""
        shape = DeviceShape(PAIR_STREAMS, self.order.shape.ctx_slot)
        copies = await asyncio.to_thread(_twice, turn.model, turn.folder)
        for name, models, flags in (
            ("pair-one", copies[:1], ("--device", "0")),
            ("pair-both", copies, _on_each(copies)),
        ):
            server = StokerOnDevice(models, shape, cache, (*self.order.stoker_flags, *flags))
            row = Crowd(name, PAIR_STREAMS, self.order.sizes.num_tokens * LONG_TIMES)
            await self._turn(turn.by(server), [row], f"{name}-start")

    async def _gate(self, turn: _Turn) -> None:
        """A server on each of two cards: the same crowd asks a gate before both, one of them, it itself."""
        if self._is_late:
            self._leave_out(f"{turn.model.name}: {turn.label}, gate")
            return
        self.console.print(f"{turn.model.name}: a gate before two servers ...", markup=False)
        shape, num_tokens = self.order.shape, self.order.sizes.num_tokens * GATE_TIMES
        try:
            async with AsyncExitStack() as stack:
                servers = []
                for index in range(2):
                    flags = (*self.order.stoker_flags, *_on_card(index))
                    server = StokerOnDevice((turn.model,), shape, turn.folder / f"cache-{index}", flags)
                    serving = self._served(turn.by(server), "gate-start")
                    servers.append(await stack.enter_async_context(serving))
                await self._row(Crowd("gate-direct", 2 * shape.num_slots, num_tokens), turn, servers[0])
                for name, behind in (("gate-one", servers[:1]), ("gate-both", servers)):
                    gate = GateOnDevices(tuple(one.url for one in behind), turn.folder / name)
                    async with self._served(turn.by(gate), f"{name}-start") as served:
                        await self._row(Crowd(name, 2 * shape.num_slots, num_tokens), turn, served)
        except (BenchError, OSError) as error:
            self._keep(turn.line("gate-start", error=str(error)))

    async def _limits(self, model: Path, round_: int) -> None:
        if self._is_late:
            self._leave_out(f"{model.name}: {LIMIT}")
            return
        self.console.print(f"{model.name}: {LIMIT} ...", markup=False)
        try:
            for line in await asyncio.to_thread(
                lambda: list(measure_limits(self.order.programs, model, self.order.sizes, round_))
            ):
                self._keep(line)
        except (BenchError, OSError) as error:
            self._keep(Line(model=model.name, server=LIMIT, round=round_, error=str(error)))

    async def _turn(self, turn: _Turn, rows: Sequence[Row], start_row: str) -> None:
        """Start a server, run its rows, stop it; `start_row` is how long the start took."""
        if self._is_late:
            self._leave_out(f"{turn.model.name}: {turn.label}, {', '.join(row.name for row in rows)}")
            return
        self.console.print(f"{turn.model.name}: {turn.label} ...", markup=False)
        try:
            async with self._served(turn, start_row) as served:
                for row in rows:
                    await self._row(row, turn, served)
        except (BenchError, OSError) as error:
            self._keep(turn.line(start_row, error=str(error)))

    @asynccontextmanager
    async def _served(self, turn: _Turn, start_row: str) -> AsyncIterator[Served]:
        assert turn.server is not None
        shape = Shape(self.order.shape.num_slots, self.order.shape.num_cells, None)
        process = ServerProcess(turn.server, shape, turn.folder, self.order.programs.environment)
        began_s = time.perf_counter()
        async with AsyncExitStack() as stack:
            async with limited(START_LIMIT_S, f"{turn.label} was not ready"):
                await stack.enter_async_context(process)
            self._keep(turn.line(start_row, values={"ready_s": time.perf_counter() - began_s}))
            client = Client(process.client.url)
            served = Served(client.url, tuple(await client.models()), process.pid, f"{turn.round_}")
            await _warm_up(served, max(self.order.sizes.rows))
            yield served

    async def _row(self, row: Row, turn: _Turn, served: Served) -> None:
        if self._is_late:
            self._leave_out(f"{turn.model.name}: {turn.label}, {row.name}")
            return
        process = psutil.Process()
        began_s, cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
        try:
            async with limited(ROW_LIMIT_S, f"{row.name} did not come to its end"):
                values = dict(await row.run(served))
        except (BenchError, OSError) as error:
            self._keep(turn.line(row.name, error=str(error)))
            return
        busy = (sum(process.cpu_times()[:2]) - cpu_s) / (time.perf_counter() - began_s)
        self._keep(turn.line(row.name, values=values, client_busy=busy))

    def _leave_out(self, what: str) -> None:
        self.left_out.append(f"{what}, for want of time")

    def _keep(self, line: Line) -> None:
        self.lines.add(line)
        shown = ", ".join(f"{name} {value:,.3f}" for name, value in line.values.items())
        self.console.print(f"  {line.row} {shown}{line.error}", markup=False)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One server's turn at the card."""

    label: str
    server: Server | None
    model: Path
    round_: int
    folder: Path

    def by(self, server: Server) -> _Turn:
        """The same turn of that server."""
        return _Turn(self.label, server, self.model, self.round_, self.folder)

    def line(
        self, row: str, *, values: dict[str, float] | None = None, error: str = "", client_busy: float = 0.0
    ) -> Line:
        """What it gave."""
        return Line(
            model=self.model.name,
            server=self.label,
            row=row,
            round=self.round_,
            values=values or {},
            error=error,
            client_busy=client_busy,
        )


@asynccontextmanager
async def limited(limit_s: float, complaint: str) -> AsyncIterator[None]:
    """Raises BenchError where the block takes longer than `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BenchError(f"{complaint} within {limit_s:g} s") from None


async def _warm_up(served: Served, num_streams: int) -> None:
    """Crowds whose time is not taken: kernels, graphs and memory of every size belong to no row."""
    for count in (1, num_streams):
        asked = [
            Completion(prompt=random_prompt(WARM_TOKENS, f"warm {count} {index}"), max_tokens=WARM_TOKENS)
            for index in range(count)
        ]
        for model in served.models:
            await read_crowd(served.url, asked, model)


def _read_whole(model: Path) -> int:
    """Size of a file that is in the page cache from here on: no start is slower for being the first."""
    size_bytes = 0
    with model.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            size_bytes += len(part)
    return size_bytes


def _twice(model: Path, folder: Path) -> tuple[Path, ...]:
    """The file under two names; copied where it lies on another file system."""
    copies = tuple(folder / f"{name}{model.suffix}" for name in ("first", "second"))
    for copy in copies:
        copy.unlink(missing_ok=True)
        try:
            copy.hardlink_to(model.resolve())
        except OSError:
            shutil.copyfile(model, copy)
    return copies


def _on_each(models: Sequence[Path]) -> tuple[str, ...]:
    """Flags that put each model on a card of its own."""
    return tuple(
        word for index, model in enumerate(models) for word in ("--placement", f"{model.stem}:device={index}")
    )


def _on_card(index: int) -> tuple[str, ...]:
    """Flags that give a server that card alone."""
    return ("--device", str(index))


def device_facts() -> dict[str, str]:
    """Names of the cards by index, as the driver tells them; none without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    fields = "--query-gpu=index,name,memory.total,driver_version"
    answer = subprocess.run(
        [command, fields, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    rows = [line.partition(", ") for line in answer.stdout.splitlines()]
    return {f"device {index}": name for index, _, name in rows}
