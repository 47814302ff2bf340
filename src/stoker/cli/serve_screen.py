"""What `stoker serve` shows: how far models are, where it serves what, and at the bottom how it is doing now.

Owns the words and their layout. Lines about requests are the log's, which `stoker.cli.logs` sends to the same
console, above the status.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from stoker.cli.session import Activity
from stoker.errors import StokerError
from stoker.server.inbound.address import is_loopback
from stoker.server.run_file import url_of
from stoker.server.serve import Screen
from stoker.wording import count_text, duration_text, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console
    from rich.text import Text

    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.status import RuntimeStatus, SlotStatus
    from stoker.server.service import Service
    from stoker.settings import EngineSettings, ServerSettings

    OwnFacts = Callable[[Sequence[ModelInfo]], list[tuple[str, str]]]

log = logging.getLogger(__name__)

PERIOD_S = 1.0
_LOADING = frozenset({"loading", "downloading"})
MAX_STATUS_COLUMNS = 76  # in a window made narrower a longer line would be left behind in pieces


class ServeInLog(Screen):
    """For a program or a log that reads: the readiness line on stdout, the rest is the log's.

    Args:
        engine: the engine's settings.
        server: the server's.
        own: what there is to know beside its addresses and models; None: of an engine of its own.
    """

    def __init__(self, engine: EngineSettings, server: ServerSettings, own: OwnFacts | None = None) -> None:
        self._server, self._own = server, own or partial(engine_facts, engine)

    def loading(self, state: ModelState) -> None:
        """The log has it."""

    def ready(self, line: str, service: Service) -> None:
        """Print the readiness line, and log what else there is to know."""
        print(line, flush=True)
        facts = facts_of(service, self._server, self._own)
        told: list[str] = []
        for name, text in facts:
            told.append(f"{name}: {text}" if name or not told else f"{told.pop()}, {text}")
        log.info("ready: %s", "; ".join(told))


class ServeInTerminal(Screen):
    """For a person.

    Args:
        engine, server, own: as of `ServeInLog`.
        console: on stderr, a terminal.
    """

    def __init__(
        self, engine: EngineSettings, server: ServerSettings, console: Console, own: OwnFacts | None = None
    ) -> None:
        self._server, self._console = server, console
        self._own = own or partial(engine_facts, engine)
        self._began_s = time.monotonic()
        self._activity: Activity | None = None
        self._status = StatusLine(self._began_s)
        self._is_ready = asyncio.Event()

    def loading(self, state: ModelState) -> None:
        """A bar for each model, until it serves."""
        if not self._is_ready.is_set():
            if self._activity is None:
                self._activity = Activity(self._console).__enter__()
            self._activity.on_load(state)

    def ready(self, line: str, service: Service) -> None:
        """The readiness line on stdout, dim where that is a terminal too; then the block."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        self._end_loading()
        Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False).print(line, style="dim")
        sys.stdout.flush()
        facts = facts_of(service, self._server, self._own)
        table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold", min_width=max(len(text) for _, text in facts if " " not in text))
        for name, text in facts:
            table.add_row(name, text)
        took_s = time.monotonic() - self._began_s
        self._console.print(Text(f"\nStoker {version('stoker')} is ready after {took_s:.1f} s", "bold"))
        self._console.print(table, "", crop=False)  # a narrow terminal wraps a URL itself, so it stays whole
        self._is_ready.set()

    async def watch(self, service: Service) -> None:
        """The status at the bottom, from ready to the end."""
        from rich.live import Live

        try:
            await self._is_ready.wait()
            with Live(
                get_renderable=self._status.shown,
                console=self._console,
                transient=True,
                refresh_per_second=2,
                redirect_stdout=False,
                redirect_stderr=False,
            ):
                while True:
                    await self._status.read(service)
                    await asyncio.sleep(PERIOD_S)
        finally:
            self._end_loading()

    def _end_loading(self) -> None:
        if self._activity is not None:
            self._activity.clear()
            self._activity = None


class StatusLine:
    """How the server is doing, in a line.

    Args:
        began_s: when it was started, on the monotonic clock.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._text = ""
        self._written: dict[str, int] = {}
        self._read_s = began_s

    def __repr__(self) -> str:
        return f"<StatusLine {self._text!r}>"

    def shown(self) -> Text:
        """The line as it is now."""
        from rich.text import Text

        text = Text(self._text, "reverse", no_wrap=True, overflow="ellipsis")
        text.truncate(MAX_STATUS_COLUMNS, overflow="ellipsis")
        return text

    async def read(self, service: Service) -> None:
        """Look again."""
        try:
            status = await service.context.runtime.status()
        except StokerError:  # it ends
            return
        self._text = f" {self.text_of(status, service, time.monotonic())} "

    def text_of(self, status: RuntimeStatus, service: Service, now: float) -> str:
        """The line's text."""
        if service.context.is_stopping:
            left = service.num_live
            return (
                f"stopping: {count_text(left, 'request')} left; Ctrl-C again ends at once"
                if left
                else "stopping"
            )
        engine = status.engine
        num_running = sum(slot.request_id is not None for slot in engine.slots)
        parts = [] if status.state == "serving" else [status.state]
        parts += [f"{num_running} running", f"{len(engine.queue)} waiting"]
        if num_parked := len(engine.parked) + len(engine.paused):
            parts.append(f"{num_parked} parked")
        parts += [f"{each.id} {each.fraction:.0%}" for each in engine.models if each.state in _LOADING]
        parts.append(f"{self._speed(engine.slots, now):.0f} tokens/s")
        memory = engine.memory
        if memory.limit:
            parts.append(f"{size_text(memory.footprint)} of {size_text(memory.limit)}")
        if memory.pressure not in {"", "normal"}:
            parts.append(f"memory {memory.pressure}")
        if memory.heat != "nominal":
            parts.append(f"heat {memory.heat}")
        return " · ".join([*parts, f"up {duration_text(now - self._began_s)}"])

    def _speed(self, slots: Sequence[SlotStatus], now: float) -> float:
        """Tokens a second that requests have written since the last look; of those that ran then too."""
        written = {
            slot.request_id: slot.num_tokens
            for slot in slots
            if slot.request_id is not None and slot.state == "decode"
        }
        more = sum(num - self._written.get(request_id, num) for request_id, num in written.items())
        speed = max(0, more) / max(now - self._read_s, 1e-3)
        self._written, self._read_s = written, now
        return speed


def facts_of(service: Service, server: ServerSettings, own: OwnFacts) -> list[tuple[str, str]]:
    """What a person wants to know of a server that is ready, each with its name."""
    host, port = service.address
    url = url_of(host, port)
    models = service.context.runtime.models
    ollama = url if service.second_port is None else url_of(host, service.second_port)
    facts = [("OpenAI API", f"{url}/v1"), ("Anthropic API", url), ("Ollama API", ollama)]
    if server.ui:
        facts.append(("page", f"{url}/ui"))
    facts.append(("status", f"{url}/v1/runtime"))
    facts.append(("metrics", f"{url}/metrics"))
    facts += [("model" if at == 0 else "", _model_text(info)) for at, info in enumerate(models)]
    facts.append(("keys", _keys_text(host, server)))
    return facts + own(models)


def engine_facts(engine: EngineSettings, models: Sequence[ModelInfo]) -> list[tuple[str, str]]:
    """The same of an engine of its own."""
    facts = [("slots", f"{engine.slots}, {_context(engine, models)}"), ("cache", _cache_text(engine))]
    if models:
        computing = [info for info in models if info.label] or models[:1]
        places = [f"{info.label}, {count_text(info.num_threads, 'thread')}" for info in computing]
        facts += [("" if at else "computes on", text) for at, text in enumerate(dict.fromkeys(places))]
        facts += [("repeatable", text) for text in _repeatable_text(models[0])]
    return facts


def _model_text(info: ModelInfo) -> str:
    parts = [info.id]
    if info.size_bytes:
        parts.append(size_text(info.size_bytes))
    whose = " each" if info.kv_layout == "streams" else ""
    parts.append(f"{count_text(info.n_ctx, 'token')} of context{whose}")
    return ", ".join([*parts, *info.degraded])


def _repeatable_text(info: ModelInfo) -> list[str]:
    """Whether its answers are repeatable, and what that takes; empty where nothing was chosen."""
    cost = info.repeatable_cost
    if cost is None:
        return ["on"] if info.is_repeatable else []
    more = f"{max(cost, 0.0):.0%} more time here"
    return [f"on, takes up to {more}" if info.is_repeatable else f"off, on would take up to {more}"]


def _context(engine: EngineSettings, models: Iterable[ModelInfo]) -> str:
    if any(info.kv_layout == "streams" for info in models):
        return "each with all of a model's context"
    found = {info.num_cells for info in models if info.num_slots > 1}
    cells = sorted(found - {0}) or [engine.kv_cells or engine.ctx_size]
    if cells == [0]:
        return "sharing the model's own context"
    least = f"{cells[0]:,} to " if len(cells) > 1 else ""
    return f"sharing {least}{count_text(cells[-1], 'token')}"


def _keys_text(address: str, server: ServerSettings) -> str:
    if server.keys:
        files = [str(each) for each in (server.api_key_file, server.admin_key_file) if each is not None]
        named = count_text(len(server.keys), "named key")
        return " or ".join([f"one of {named}", *(f"of {file}" for file in files)])
    if server.api_key_file is None:
        who = "only this machine's programs reach it" if is_loopback(address) else "anybody may use it"
        return f"not asked for; {who}"
    operators = f"; of operators in {server.admin_key_file}" if server.admin_key_file else ""
    return f"one of {server.api_key_file}{operators}"


def _cache_text(engine: EngineSettings) -> str:
    if engine.cache_mode == "off":
        return "off"
    parts = ["cells"] if "live" in engine.cache_mode else []
    if "snapshot" in engine.cache_mode:
        if engine.cache_ram_bytes:
            parts.append(f"{size_text(engine.cache_ram_bytes)} of memory")
        if engine.cache_disk_bytes:
            parts.append(f"{size_text(engine.cache_disk_bytes)} in {engine.cache_dir}")
    return ", ".join(parts)
