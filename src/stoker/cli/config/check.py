"""What is wrong with a settings file, all of it, each with its line."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.client.models.specs import ModelSource
from stoker.errors import InvalidRequestError, StokerError, error_from_info
from stoker.server.inbound.security import KeyRing
from stoker.server.serve import check_addresses
from stoker.settings import load_settings, mistakes_of, settings_text, toml_problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.settings import EngineSettings, ServerSettings

_HEADER = re.compile(r"\s*\[+\s*(.+?)\s*\]+\s*(?:#.*)?")
_LINE = re.compile(r"at line (\d+)")

_OF_NO_TABLE: dict[str, Any] = {
    "placement": {},
    "draft_model": None,
    "lora": (),
    "mmproj": None,
    "chat_template": (),
    "rerank_output": (),
}
"""Settings beside the tables that may name other models than the one of a table, taken out."""


class Problem(NamedTuple):
    """Something wrong: the line it stands in (0: not known), its key such as `models.NAME.file`, and what."""

    line: int
    key: str
    text: str


def problems_of(path: Path) -> list[Problem]:
    """Everything that is wrong with a settings file; of a syntax error nothing else.

    Reads the headers of the files that it names, templates and keys; loads nothing.

    Raises:
        MachineSetupError: the file cannot be read.
    """
    text = settings_text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _LINE.search(str(error))
        return [Problem(int(found[1]) if found else 0, "", toml_problem(error))]
    errors: list[StokerError] = list(mistakes_of(document))
    if not errors:
        try:
            engine, server = load_settings({}, path)
        except StokerError as error:
            errors = [error]
        else:
            errors = list(_unserved(engine, server))
    return [_problem(text, error) for error in errors]


def _unserved(engine: EngineSettings, server: ServerSettings) -> Iterator[StokerError]:
    """Why models cannot be served, each, or else all together; what is wrong with key files and addresses."""
    num_wrong = 0
    for name, table in engine.model_tables.items():
        try:
            ModelSource.read(engine.replace(models=(name,), model_tables={name: table}, **_OF_NO_TABLE))
        except StokerError as error:
            num_wrong += 1
            yield error
    if not num_wrong:
        try:
            source = ModelSource.read(engine)
        except StokerError as error:
            yield error
        else:
            yield from _strangers(server, source)
    for name, file in (("api_key_file", server.api_key_file), ("admin_key_file", server.admin_key_file)):
        try:
            KeyRing.read(file)
        except StokerError as error:
            yield error_from_info(msgspec.structs.replace(error.info(), param=name))
    try:
        check_addresses(server)
    except StokerError as error:
        yield error


def _strangers(server: ServerSettings, source: ModelSource) -> Iterator[StokerError]:
    """Models of keys that are not served; those of the hub may be pulled later."""
    infos = [model.info for model in source.served]
    served = {name for one in infos for name in (one.id, *one.aliases, *(each.name for each in one.adapters))}
    for name, key in server.keys.items():
        for model in key.models:
            if model not in served and "/" not in model:
                text = f"no model {model!r} is served; there are: {', '.join(sorted(served))}"
                yield InvalidRequestError(text, param=f"keys.{name}.models")


def _problem(text: str, error: StokerError) -> Problem:
    key = error.param or ""
    return Problem(line_of(text, key), key, error.message.removeprefix(f"{key}: "))


def line_of(text: str, key: str) -> int:
    """Line of a key such as `slots`, `models.NAME` or `models.NAME.slots`, from 1; 0: it was not found."""
    head, _, rest = key.partition(".")
    table, found, wanted = "", 0, key.replace("-", "_")
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            table = header[1].replace('"', "").replace("'", "")
            place = table
            if not found and table.startswith(f"{key}."):
                found = number
        else:
            name = line.partition("=")[0].strip().strip("\"'")
            place = f"{table}.{name}" if table else name
        if place.replace("-", "_") == wanted:
            return number
        if not found and rest and table == f"{head}.{rest.rpartition('.')[0]}":
            found = number
    return found
