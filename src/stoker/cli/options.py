"""Options that several commands share, and the settings they make together with environment and file.

Defaults shown here are words for people: a flag that is not given stays None, so that `STOKER_*` and the
TOML file can speak (`stoker.settings` has the values).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

    RuntimeFactory = Callable[[EngineSettings], Runtime]

Config = Annotated[Path | None, typer.Option("--config", help="TOML file with any of the settings.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Name from `stoker models` or path of a GGUF file. \\[embedded default]"
    ),
]
CtxSize = Annotated[
    int | None, typer.Option("--ctx-size", "-c", help="Tokens of context all slots share. \\[16384]")
]
Threads = Annotated[
    str | None, typer.Option("--threads", "-t", help="CPU threads, or auto. \\[auto]", metavar="auto|N")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to answer with at most.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer. \\[random]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

DEFAULT_MAX_TOKENS = 512
DEFAULT_TEMPERATURE = 0.8


def engine_settings(config: Path | None, **flags: Any) -> EngineSettings:
    """Settings of an engine for one user in a terminal.

    Raises:
        InvalidRequestError, MachineSetupError: see `stoker.settings.load_settings`.
    """
    from stoker.settings import load_settings

    return load_settings(flags, config)[0]
