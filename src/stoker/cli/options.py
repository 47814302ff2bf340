"""Options that several commands share, and the settings they make together with environment and file.

The option of a setting is made of what `stoker.settings` says of it. A flag that is not given stays None, so
that `STOKER_*` and the TOML file count.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.settings import flag_of, load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

    RuntimeFactory = Callable[[EngineSettings], Runtime]


def option_of(name: str, panel: str | None = None) -> Any:
    """The option of a setting, for `Annotated`, in that panel of `--help`."""
    flag = flag_of(name)
    text = f"{flag.text} \\[{flag.shown}]" if flag.shown else flag.text
    return typer.Option(*flag.names, help=text, metavar=flag.metavar or None, rich_help_panel=panel)


Config = Annotated[Path | None, typer.Option("--config", help="TOML file with any of the settings.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Name from `stoker models` or path of a GGUF file. \\[embedded default]"
    ),
]
CtxSize = Annotated[int | None, option_of("ctx_size")]
Threads = Annotated[str | None, option_of("threads")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to answer with at most.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer. \\[random]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

DEFAULT_MAX_TOKENS = 512
DEFAULT_TEMPERATURE = 0.8


def engine_settings(config: Path | None, *, model: str | None = None, **flags: Any) -> EngineSettings:
    """Settings of an engine for one user in a terminal, who asks for that model.

    Raises:
        InvalidRequestError, MachineSetupError: see `stoker.settings.load_settings`.
    """
    return load_settings({**flags, "models": [model] if model else None}, config)[0]
