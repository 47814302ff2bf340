"""docs/settings.md: every setting with its flag, variable, key, default and meaning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from tools.reference_pages.markdown import MADE, table

from stoker.cli.commands.serve import PANELS
from stoker.setting_fields import ENV_PREFIX
from stoker.settings import EngineSettings, ServerSettings, flag_of

HEAD = f"""# Settings

{MADE}
A setting is a flag of `stoker serve`, an environment variable, a key of a TOML file (`--config FILE`) and,
where it is the engine's, a keyword of `Runtime(...)` in a program. Flags beat the environment, which beats
the file. An unknown name is refused.

Sizes are bytes or such as `512MiB` and `4GiB`; times are seconds, where it says so also `30s`, `10m`, `2h`.
What may be given several times is a list in TOML and parted by commas in the environment. Folders are those
of Linux without `XDG_` variables.
"""
EXAMPLE = """
```toml
models = ["my.gguf"]
slots = 4
memory_limit = "4GiB"
port = 8686
```
"""
_HOME = "/home-of-the-user"


def settings_page() -> str:
    """The page."""
    fields = EngineSettings.model_fields | ServerSettings.model_fields
    parts = [HEAD, EXAMPLE]
    for panel, names in PANELS.items():
        rows = [_row(name, fields[name]) for name in names.split()]
        parts += [f"\n## {panel}\n\n", table(("key", "flag", "variable", "default", "meaning"), rows)]
    return "".join(parts)


def _row(name: str, setting: Any) -> tuple[str, ...]:
    flag = flag_of(name)
    form = f" {flag.metavar}" if flag.metavar else ""
    shown = ", ".join(f"`{each}{form}`" for each in flag.names)
    default = flag.shown or _default(setting)
    where = "" if name in EngineSettings.model_fields else " (server)"
    return f"`{name}`{where}", shown, f"`{ENV_PREFIX}{name.upper()}`", default, flag.text


def _default(setting: Any) -> str:
    """In words; folders as Linux has them."""
    if setting.default_factory is not None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
        with mock.patch.dict(os.environ, {**kept, "HOME": _HOME}, clear=True):
            return f"`{Path(setting.default_factory())}`".replace(_HOME, "~")
    if setting.default is None or setting.default == ():
        return "none"
    return f"`{setting.default}`" if get_args(setting.annotation) or setting.default else str(setting.default)
