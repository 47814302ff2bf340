"""Where a command computes: by the server that runs here, or by a model that it loads itself.

Owns the options that say so, which `asks_model` adds to a command, and how a running server is found: by its
run file (`stoker.server.run_file`), if it answers.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stoker.cli import logs
from stoker.cli.fitting_model import with_fitting_model
from stoker.cli.options import (
    PANEL,
    Config,
    CtxSize,
    LogFile,
    LogLevel,
    Model,
    Threads,
    engine_settings,
    with_options,
)
from stoker.cli.session import opened
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from stoker.cli.fitting_model import Work
    from stoker.cli.options import RuntimeFactory
    from stoker.runtime import Runtime
    from stoker.server.run_file import RunFile

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8686"
_HEALTH_S = 2.0

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="STOKER_URL",
        show_envvar=False,
        help="Ask the server there. [$STOKER_URL, else the one that runs here]",
        metavar="URL",
        rich_help_panel=PANEL,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="STOKER_API_KEY",
        show_envvar=False,
        help="The server's API key, where it asks for one. [$STOKER_API_KEY]",
        metavar="KEY",
        rich_help_panel=PANEL,
    ),
]
NoServer = Annotated[
    bool,
    typer.Option("--no-server", help="Load a model here, even where a server runs.", rich_help_panel=PANEL),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the options of a command say of where it computes, and with what.

    Attributes:
        model: name or path; None: whatever is fit for the command.
        url: of a server that has to be asked; None: the one that runs here, if one does.
        no_server: ask none.
        api_key: for the server.
        ctx_size: of a model that is loaded here.
        threads: of a model that is loaded here.
        config: settings file.
        factory: what makes the runtime; None: the usual one. For tests.
    """

    model: str | None = None
    url: str | None = None
    no_server: bool = False
    api_key: str | None = None
    ctx_size: int | None = None
    threads: str | None = None
    config: Path | None = None
    factory: RuntimeFactory | None = None

    @asynccontextmanager
    async def opened(self, work: Work, **flags: Any) -> AsyncIterator[Runtime]:
        """A started runtime that has a model for the work; `flags` are settings of one that is loaded here.

        Raises:
            InvalidRequestError, MachineSetupError: a setting is wrong.
            StokerError: no model can be served.
        """
        own = {"ctx_size": self.ctx_size, "threads": self.threads}
        settings = engine_settings(self.config, model=self.model, **own, **flags)
        if self.factory is None:
            settings = with_fitting_model(work, settings, is_named=self.model is not None)
        async with opened(settings, self.factory) as runtime:
            yield runtime

    def answered(self, work: Work, question: Callable[[Runtime], Awaitable[T]]) -> T:
        """What one question to such a runtime comes to; raises what `opened` and the question raise."""

        async def ask() -> T:
            async with self.opened(work) as runtime:
                return await question(runtime)

        return asyncio.run(ask())


OPTIONS: dict[str, tuple[Any, Any]] = {
    "ctx": (typer.Context, inspect.Parameter.empty),
    "model": (Model, None),
    "url": (Url, None),
    "no_server": (NoServer, False),
    "api_key": (ApiKey, None),
    "ctx_size": (CtxSize, None),
    "threads": (Threads, None),
    "config": (Config, None),
    "log_level": (LogLevel, None),
    "log_file": (LogFile, None),
}


def asks_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is its `Target`, with the options of one in that parameter's place."""

    def call(own: dict[str, Any], further: dict[str, Any]) -> None:
        ctx = further.pop("ctx")
        logs.set_up_if_asked(
            further["config"], {name: further.pop(name) for name in ("log_level", "log_file")}
        )
        target = Target(factory=ctx.obj, **further)
        _refuse_both(ctx, target)
        command(target, **own)

    return with_options(command, OPTIONS, call)


def _refuse_both(ctx: typer.Context, target: Target) -> None:
    """Refuse a server and none at all, both on the command line; an address in the environment gives way."""
    source = ctx.get_parameter_source("url")
    if target.no_server and source is not None and source.name == "COMMANDLINE":
        raise InvalidRequestError("--url and --no-server exclude each other", param="url")


def running_server(run_dir: Path) -> RunFile | None:
    """The server that runs here and answers, the last started first; None: none does."""
    from stoker.server.run_file import found_servers

    return next((entry for entry in found_servers(run_dir) if _answers(entry.url)), None)


def server_url(url: str | None) -> str:
    """Where the server is that a command asks: as given, else the running one's, else the usual address."""
    if url is not None:
        return url
    found = running_server(engine_settings(None).run_dir)
    return found.url if found else DEFAULT_URL


def _answers(url: str) -> bool:
    import httpx

    try:
        # A proxy of the environment is for the network, not for this machine.
        return bool(httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False).json()["engine"])
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return False
