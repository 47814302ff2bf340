"""`stoker ray`: deploy a site on a cluster of Ray, look at it, delete it.

The sites' file is `stoker.ray.site`'s, what the cluster is told `stoker.ray.deploy`'s, which needs the extra.
"""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.command import HelpfulCommand, HelpfulGroup
from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Version, with_version
from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.ray.site import RaySite, read_site

if TYPE_CHECKING:
    from stoker.ray.deploy import SiteStatus

DEFAULT_NAME = "stoker"

File = Annotated[Path, typer.Argument(help="Settings file with a table [ray].", metavar="FILE")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Cluster: HOST:PORT of its head. [RAY_ADDRESS, else the one of this machine]",
        metavar="HOST:PORT",
    ),
]
Name = Annotated[str | None, typer.Argument(help="Name of the site. [stoker]", metavar="NAME")]

app = typer.Typer(
    cls=HelpfulGroup,
    rich_markup_mode=None,
    help="Serve the models of a settings file with replicas on a cluster of Ray.",
    epilog="stoker ray deploy site.toml\nstoker ray status\nstoker ray config site.toml > serve.yaml",
)


@app.callback()
def _options(*, _version: Version = False) -> None:
    pass


def _deployer() -> Any:
    """The module that knows Ray. Raises MachineSetupError: the extra is not installed."""
    try:
        return import_module("stoker.ray.deploy")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        text = 'Ray Serve is not installed here: pip install "stoker[ray]"'
        raise MachineSetupError(text, param="ray") from None


def _checked(file: Path) -> RaySite:
    """The site of a file in which nothing is wrong; else its mistakes are told.

    Raises:
        InvalidRequestError: something is; the first of it, with how much more there is.
        MachineSetupError: the file cannot be read.
    """
    from stoker.cli.config.check import problems_of

    problems = problems_of(file)
    if not problems:
        return read_site(file)
    line, key, text = problems[0]
    where = f"{file}:{line}" if line else str(file)
    more = f"; {len(problems) - 1} more: stoker config check {file}" if len(problems) > 1 else ""
    raise InvalidRequestError(f"{where}: {key}: {text}{more}" if key else f"{where}: {text}{more}", param=key)


@app.command(
    "deploy",
    cls=HelpfulCommand,
    epilog="stoker ray deploy site.toml\nstoker ray deploy site.toml --address 10.0.0.1:6379",
)
@with_version
def deploy(file: File, *, address: Address = None) -> None:
    """Deploy the site of a settings file, or update it to what the file says now; returns when it serves.

    Without a cluster one is started on this machine, for as long as the command runs.
    """
    site = _checked(file)
    deployer = _deployer()

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    with deployer.cluster(address, tell) as is_own:
        url = deployer.deploy(site, tell)
        typer.echo(url)
        if is_own:
            tell("Ctrl-C ends it")
            _until_stopped()


def _until_stopped() -> None:
    """Return at SIGTERM; Ctrl-C is the caller's."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        stopped.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command("config", cls=HelpfulCommand, epilog="stoker ray config site.toml > serve.yaml")
@with_version
def config(file: File) -> None:
    """Print the site as a configuration for `serve deploy`, in YAML; nothing is deployed."""
    site = _checked(file)
    deployer = _deployer()
    typer.echo(deployer.serve_config(site), nl=False)


@app.command("status", cls=HelpfulCommand, epilog="stoker ray status\nstoker ray status --json")
@with_version
def status(*, address: Address = None, as_json: AsJson = False) -> None:
    """Show the sites of a cluster: their replicas and doors by state; exit code 1 if one does not run."""
    deployer = _deployer()
    with deployer.cluster(address, None):
        sites: list[SiteStatus] = deployer.site_statuses()
    if as_json:
        typer.echo(json.dumps([asdict(site) for site in sites], indent=2))
    for site in [] if as_json else sites:
        typer.echo(f"{site.name}: {site.state.lower()}{f', {site.message}' if site.message else ''}")
        for part in site.parts:
            message = f" ({part.message})" if part.message else ""
            typer.echo(f"  {part.name}: {part.text}{message}")
    if not sites and not as_json:
        typer.echo("no site is deployed there")
    if not sites or any(site.state != "RUNNING" for site in sites):
        raise typer.Exit(ExitCode.NO)


@app.command("delete", cls=HelpfulCommand, epilog="stoker ray delete\nstoker ray delete nightly")
@with_version
def delete(name: Name = None, *, address: Address = None) -> None:
    """Take a site off its cluster: what runs is finished first, for `stop_s` at most."""
    deployer = _deployer()
    name = name or DEFAULT_NAME
    with deployer.cluster(address, None):
        if not deployer.delete(name):
            raise InvalidRequestError(
                f"name: no site {name!r} is deployed there; `stoker ray status` shows them", param="name"
            )
    typer.echo(f"{name} is deleted")
