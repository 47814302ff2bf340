"""Where a command computes: at the server that runs here, or with a model that it loads itself.

Owns the options that say so, which `asks_model` adds to a command, how a running server is found (by its run
file, if it answers), which of its models is asked, and the line that says so. A server that was found and
does not serve what is asked is left aside; one that was named is not.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stoker.cli import logs
from stoker.cli.download import here_or_offered
from stoker.cli.fitting_model import of_served_models, with_fitting_model
from stoker.cli.options import (
    PANEL,
    Backend,
    Config,
    CtxSize,
    LogFile,
    LogLevel,
    Model,
    Threads,
    engine_settings,
    with_options,
)
from stoker.cli.session import Activity, opened, tell
from stoker.errors import (
    AuthenticationError,
    InvalidRequestError,
    MachineSetupError,
    ModelNotFoundError,
    NotReadyError,
)
from stoker.settings import DEFAULT_URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from stoker.cli.fitting_model import Work
    from stoker.cli.options import RuntimeFactory
    from stoker.remote.runtime import RemoteRuntime
    from stoker.runtime import Runtime
    from stoker.server.run_file import RunFile

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command asks: a started runtime, and the id of one of its models."""

    runtime: Runtime | RemoteRuntime
    model: str


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
        backend: of a model that is loaded here.
        config: settings file.
        factory: what makes the runtime; None: the usual one. For tests.
    """

    model: str | None = None
    url: str | None = None
    no_server: bool = False
    api_key: str | None = None
    ctx_size: int | None = None
    threads: str | None = None
    backend: str | None = None
    config: Path | None = None
    factory: RuntimeFactory | None = None

    @asynccontextmanager
    async def opened(self, work: Work, **flags: Any) -> AsyncIterator[Asked]:
        """A started runtime and its model for the work.

        Args:
            work: what a model is wanted for.
            flags: settings of a model that is loaded here.

        Raises:
            InvalidRequestError, MachineSetupError: a setting is wrong.
            StokerError: no model can be served, or the server does not answer.
        """
        own = {"ctx_size": self.ctx_size, "threads": self.threads, "backend": self.backend}
        settings = engine_settings(self.config, model=self.model, **own, **flags)
        url = self._server(settings.run_dir)
        if url is not None:
            async with _connected(url, self.api_key, is_named=self.url is not None) as remote:
                try:
                    model = of_served_models(work, remote.models, self.model, url)
                except ModelNotFoundError as error:
                    if self.url is not None:
                        error.message += ", and --no-server in place of --url loads a model here"
                        raise
                    _note(f"{error.message}; it is left aside")
                else:
                    _note(f"asking {model} at {url} (--no-server loads a model here)")
                    yield Asked(remote, model)
                    return
        if self.factory is None:
            if self.model is not None:
                settings = settings.replace(models=(here_or_offered(self.model, settings.models_dir),))
            settings = with_fitting_model(work, settings, is_named=self.model is not None)
        async with opened(settings, self.factory) as runtime:
            yield Asked(runtime, runtime.resolve(None).id)

    def answered(self, work: Work, question: Callable[[Asked], Awaitable[T]]) -> T:
        """What one question to such a runtime comes to; raises what `opened` and the question raise."""

        async def ask() -> T:
            async with self.opened(work) as asked:
                return await question(asked)

        return asyncio.run(ask())

    def _server(self, run_dir: Path) -> str | None:
        """The server to ask. Raises InvalidRequestError where options exclude one that was named."""
        if self.no_server or self.factory is not None:
            return None
        only_here = {"--ctx-size": self.ctx_size, "--threads": self.threads, "--backend": self.backend}
        given = [flag for flag, value in only_here.items() if value is not None]
        if self.url is not None:
            if given:
                text = f"{given[0]} is of a model that is loaded here, and --url of a server that has its own"
                raise InvalidRequestError(text, param="url")
            return self.url
        found = running_server(run_dir)
        if found is not None and given:
            _note(f"the server at {found.url} is left aside: {given[0]} is of a model that is loaded here")
            return None
        return found.url if found else None


OPTIONS: dict[str, tuple[Any, Any]] = {
    "ctx": (typer.Context, inspect.Parameter.empty),
    "model": (Model, None),
    "url": (Url, None),
    "no_server": (NoServer, False),
    "api_key": (ApiKey, None),
    "ctx_size": (CtxSize, None),
    "threads": (Threads, None),
    "backend": (Backend, None),
    "config": (Config, None),
    "log_level": (LogLevel, None),
    "log_file": (LogFile, None),
}


def asks_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `target` is made of the options that say where it computes."""

    def call(own: dict[str, Any], further: dict[str, Any]) -> None:
        ctx = further.pop("ctx")
        logs.set_up_if_asked(
            further["config"], {name: further.pop(name) for name in ("log_level", "log_file")}
        )
        target = Target(factory=ctx.obj, **further)
        _refuse_both(ctx, target)
        command(target=target, **own)

    return with_options(command, OPTIONS, call, fills="target")


def _refuse_both(ctx: typer.Context, target: Target) -> None:
    """Refuse a server and none at all, both on the command line; an address in the environment gives way."""
    source = ctx.get_parameter_source("url")
    if target.no_server and source is not None and source.name == "COMMANDLINE":
        raise InvalidRequestError("--url and --no-server exclude each other", param="url")


# ---------------------------------------------------------------- servers


def running_server(run_dir: Path) -> RunFile | None:
    """The last started server that runs here and answers; None: none does. One too slow is told of."""
    from stoker.server.run_file import found_servers

    return next((entry for entry in found_servers(run_dir) if _answers(entry.url)), None)


def server_url(url: str | None) -> str:
    """Where the server is that a command asks: as given, else the running one's, else the usual address."""
    if url is not None:
        return url
    found = running_server(engine_settings(None).run_dir)
    return found.url if found else DEFAULT_URL


def ask_server(
    url: str | None, api_key: str | None, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The document that a server answers with, to a body if there is one, however long it takes.

    Raises:
        StokerError: what the server said is wrong, or none answers.
    """
    from stoker.remote.connection import ServerConnection

    async def ask(server: ServerConnection) -> dict[str, Any]:
        server.open()
        try:
            return await (server.get(path, dict) if body is None else server.post(path, body))
        finally:
            await server.close()

    return asyncio.run(ask(ServerConnection(server_url(url), api_key)))


@contextmanager
def reading_answer() -> Iterator[None]:
    """Around what reads an answer of `ask_server`: a field that it lacks is told as what it is.

    Raises:
        MachineSetupError: the answer is none of this version's.
    """
    try:
        yield
    except KeyError as error:
        text = f"what answers is no Stoker, or one of another version: its answer has no {error}"
        raise MachineSetupError(text, param="url") from error


def _answers(url: str) -> bool:
    import httpx

    try:
        # A proxy of the environment is for the network, not for this machine.
        return bool(httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False).json()["engine"])
    except httpx.TimeoutException:
        _note(f"the server at {url} is left aside: it did not answer within {_HEALTH_S:g} s")
        return False
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return False


@asynccontextmanager
async def _connected(url: str, api_key: str | None, *, is_named: bool) -> AsyncIterator[RemoteRuntime]:
    """The runtime of a server; a bar shows what it loads.

    Raises:
        NotReadyError: it is suspended, so that what is asked would wait for somebody.
        StokerError: it does not answer, or lets nobody in.
    """
    from stoker.remote.runtime import RemoteRuntime

    other_way = "" if is_named else "; --no-server loads a model here"
    remote = RemoteRuntime(url, api_key=api_key)
    try:
        with Activity() as activity:
            remote.on_load = activity.on_load
            await remote.start()
        if remote.is_suspended:
            raise NotReadyError(f"the server at {url} is suspended: stoker resume wakes it{other_way}")
        yield remote
    except AuthenticationError as error:
        text = f"the server at {url} lets nobody in without a key: --api-key, or STOKER_API_KEY{other_way}"
        raise AuthenticationError(text if api_key is None else f"{error.message}{other_way}") from None
    finally:
        await remote.close()


def _note(text: str) -> None:
    """A line about where it computes, which is no part of the answer."""
    tell(f"stoker: {text}")
