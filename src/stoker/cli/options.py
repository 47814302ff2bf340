"""Options that several commands share, and the settings they make together with environment and file.

The option of a setting is made of what `stoker.settings` says of it. A flag that is not given stays None, so
that `STOKER_*` and the TOML file count.
"""

from __future__ import annotations

import functools
import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.errors import InvalidRequestError, StokerError
from stoker.settings import flag_of, load_settings
from stoker.site_settings import PlacementSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

    RuntimeFactory = Callable[[EngineSettings], Runtime]


def option_of(name: str, panel: str | None = None, default: str = "") -> Any:
    """The option of a setting, for `Annotated`, in that panel of `--help`.

    Args:
        name: of the setting.
        panel: its title; None: among the command's own options.
        default: in words, where it is not the setting's.
    """
    flag = flag_of(name)
    shown = default or flag.shown
    text = f"{flag.text} [{shown}]" if shown else flag.text
    return typer.Option(*flag.names, help=text, metavar=flag.metavar or None, rich_help_panel=panel)


def with_options(
    command: Callable[..., None],
    options: Mapping[str, tuple[Any, Any]],
    call: Callable[[dict[str, Any], dict[str, Any]], None],
    *,
    fills: str = "",
) -> Callable[..., None]:
    """A command with further options.

    Args:
        command: its parameters stay what they are, but for the one that `call` fills.
        options: annotation and default by name.
        call: called with the values of the command's own options and of the further ones.
        fills: the parameter that `call` makes of the further ones; empty: none.
    """

    @functools.wraps(command)
    def with_further(**given: Any) -> None:
        further = {name: given.pop(name, default) for name, (_, default) in options.items()}
        call(given, further)

    own = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    further = [
        inspect.Parameter(name, keyword, annotation=kind, default=default)
        for name, (kind, default) in options.items()
    ]
    own_options = [each.replace(kind=keyword) for each in own if each.name != fills]
    with_further.__signature__ = inspect.Signature([*own_options, *further])  # type: ignore[attr-defined]  # functions may have one
    return with_further


def _show_version(is_asked: bool) -> None:  # noqa: FBT001 - how the library calls it
    if is_asked:
        typer.echo(f"stoker {version('stoker')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit."),
]


def with_version(command: Callable[..., None]) -> Callable[..., None]:
    """A command with `--version`."""
    return with_options(command, {"_version": (Version, False)}, lambda own, _: command(**own))


PANEL = "Model and server"
"""Where `--help` shows what says what is asked, and where."""
DEVICES = "Devices"
"""The same of what computes a model and where it lies."""

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file with any of the settings.", metavar="FILE", rich_help_panel=PANEL
    ),
]


def models_that_begin(incomplete: str) -> list[str]:
    """Names of the models that are here, for the Tab key."""
    from stoker.models.store import ModelStore

    try:
        found = ModelStore(engine_settings(None).models_dir).list()
    except StokerError:
        return []  # what is wrong is said when the command runs
    return [model.id for model in found if model.id.casefold().startswith(incomplete.casefold())]


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Name from `stoker models` or path of a GGUF file or a folder. [the one that is fit]",
        metavar="MODEL",
        rich_help_panel=PANEL,
        autocompletion=models_that_begin,
    ),
]
CtxSize = Annotated[int | None, option_of("ctx_size", PANEL)]
Threads = Annotated[str | None, option_of("threads", PANEL)]
Backend = Annotated[str | None, option_of("backend", PANEL)]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        help="Show the log, from that level on.",
        metavar=flag_of("log_level").metavar,
        rich_help_panel=PANEL,
    ),
]
LogFile = Annotated[
    str | None,
    typer.Option("--log-file", help="Write the log there.", metavar="FILE", rich_help_panel=PANEL),
]
_SAMPLING, _FORM = "Sampling", "Form of the answer"
DEFAULT_MAX_TOKENS = 512
DEFAULT_TEMPERATURE = 0.3
"""Low, as small models wander at the library's 0.8."""


def _drawing(text: str, metavar: str) -> Any:
    """An option that says how tokens are drawn, for `Annotated`."""
    return typer.Option(help=text, metavar=metavar, rich_help_panel=_SAMPLING)


MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Tokens to answer with at most.", min=1, metavar="N")
]
System = Annotated[str | None, typer.Option("--system", help="System message.", metavar="TEXT")]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Image before the prompt; repeat for more.", metavar="FILE"),
]
Recordings = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="Recording before the prompt; repeat for more.", metavar="FILE"),
]
Documents = Annotated[
    list[Path] | None,
    typer.Option("--file", help="PDF or text before the prompt; repeat for more.", metavar="FILE"),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer; repeat for more.", metavar="TEXT"),
]
Temperature = Annotated[float, _drawing("0 always takes the likeliest token.", "X")]
TopP = Annotated[float | None, _drawing("Draw from the likeliest tokens of this share. [0.95]", "X")]
TopK = Annotated[int | None, _drawing("Draw from so many of the likeliest tokens. [40]", "N")]
MinP = Annotated[float | None, _drawing("Draw from tokens this likely beside the likeliest. [0.05]", "X")]
Seed = Annotated[int | None, _drawing("Same seed, same answer. [random]", "N")]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        "--schema",
        help="JSON Schema that the answer matches, or a file with one.",
        metavar="SCHEMA",
        rich_help_panel=_FORM,
    ),
]


def schema_text(given: str) -> str:
    """The text of a JSON Schema that stands on the command line or in a file.

    Raises:
        InvalidRequestError: it is no JSON.
        OSError: there is no such file.
    """
    text = given if given.lstrip().startswith("{") else Path(given).expanduser().read_text(encoding="utf-8")
    try:
        json.loads(text)
    except ValueError as error:
        what = "it" if text is given else given
        raise InvalidRequestError(f"json_schema: {what} is no JSON: {error}", param="json_schema") from None
    return text


Regex = Annotated[
    str | None,
    typer.Option(
        "--regex", help="Expression that the answer matches.", metavar="REGEX", rich_help_panel=_FORM
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

REQUEST_FIELDS: Mapping[str, tuple[Any, Any]] = {
    "max_tokens": (MaxTokens, DEFAULT_MAX_TOKENS),
    "stop": (Stop, None),
    "json_schema": (JsonSchema, None),
    "regex": (Regex, None),
    "temperature": (Temperature, DEFAULT_TEMPERATURE),
    "top_p": (TopP, None),
    "top_k": (TopK, None),
    "min_p": (MinP, None),
    "seed": (Seed, None),
}
"""Fields of a request, by the names of the library, with their options."""


def takes_fields(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameter `fields` holds those of these fields of a request that are given."""

    def with_fields(command: Callable[..., None]) -> Callable[..., None]:
        def call(own: dict[str, Any], further: dict[str, Any]) -> None:
            command(fields={name: value for name, value in further.items() if value is not None}, **own)

        return with_options(command, {name: REQUEST_FIELDS[name] for name in names}, call, fills="fields")

    return with_fields


def takes_placement(default: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameter `placement` holds what is given of what computes a model and where it lies.

    Args:
        default: of each of these settings, in words, where it is not the setting's.
    """
    options = {
        name: (Annotated[flag_of(name).kind | None, option_of(name, DEVICES, default)], None)
        for name in PlacementSettings.model_fields
    }

    def with_placement(command: Callable[..., None]) -> Callable[..., None]:
        def call(own: dict[str, Any], further: dict[str, Any]) -> None:
            given = {name: value for name, value in further.items() if value is not None}
            command(placement=given, **own)

        return with_options(command, options, call, fills="placement")

    return with_placement


def engine_settings(config: Path | None, *, model: str | None = None, **flags: Any) -> EngineSettings:
    """Settings of an engine for one user in a terminal, who asks for that model.

    Raises:
        InvalidRequestError, MachineSetupError: see `stoker.settings.load_settings`.
    """
    return load_settings({**flags, "models": [model] if model else None}, config)[0]
