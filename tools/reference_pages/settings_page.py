"""docs/settings.md: every setting with its flag, variable, key, default and meaning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from tools.reference_pages.markdown import MADE, table

from stoker.cli.commands.serve import PANELS
from stoker.cli.gate.command import PANELS as GATE_PANELS
from stoker.setting_fields import ENV_PREFIX, FrozenSettings
from stoker.settings import EngineSettings, ServerSettings, flag_of
from stoker.site_settings import KeySettings, ModelSettings, PerModelSettings

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
TABLES = """
## Tables of models

`[models.NAME]` names a model. The keys of all models (marked *) hold for it alone; what it leaves open is as
for all. The first table is the default model, unless `--model` names others, which may be names of tables.
How to write one, and what happens on SIGHUP: [howto/site-file.md](howto/site-file.md).

"""
KEYS = """
## Tables of keys

`[keys.NAME]` is a key by its hash: [keys.md](keys.md).

"""
_HOME = "/home-of-the-user"

_OF_GATES = "Machines (`stoker gate`)"


def settings_page() -> str:
    """The page."""
    fields = EngineSettings.model_fields | ServerSettings.model_fields
    parts = [HEAD, EXAMPLE]
    for panel, names in (*PANELS.items(), (_OF_GATES, GATE_PANELS["Machines"])):
        rows = [_row(name, fields[name]) for name in names.split()]
        parts += [f"\n## {panel}\n\n", table(("key", "flag", "variable", "default", "meaning"), rows)]
    parts += [TABLES, _table_of(ModelSettings), KEYS, _table_of(KeySettings)]
    return "".join(parts)


def _table_of(kind: type[FrozenSettings]) -> str:
    """Every key of a table: its default and its meaning."""
    shared = PerModelSettings.model_fields
    own = {name: field for name, field in kind.model_fields.items() if name not in shared}
    rows = [(f"`{name}`", _shown(field), field.description or "") for name, field in own.items()]
    rows += [(f"`{name}` *", "as for all", field.description or "") for name, field in shared.items()]
    return table(
        ("key", "default", "meaning"), rows if issubclass(kind, PerModelSettings) else rows[: len(own)]
    )


def _shown(field: Any) -> str:
    """A default in words."""
    own = (field.json_schema_extra or {}).get("shown")
    return own or ("no" if field.default is False else _default(field))


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
