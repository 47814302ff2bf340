"""What is wrong with a settings file, all of it, each with its line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.client.models.beside import parse_adapter
from stoker.client.models.specs import ModelSource
from stoker.client.models.ways import AUTO, check_backend
from stoker.errors import BackendUnavailableError, InvalidRequestError, StokerError, error_from_info
from stoker.models.adapters import read_adapter
from stoker.models.projector import read_projector
from stoker.ray.site import TABLE, mistakes_of_ray
from stoker.server.inbound.security import KeyRing
from stoker.server.serve import check_addresses
from stoker.settings import load_settings, mistakes_of, settings_text, toml_problem
from stoker.site_settings import KeySettings, ModelSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

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
_FITTED = frozenset({"lora", "mmproj"})
"""What has to fit the model of its table."""
_BESIDE_A_FILE = ("chat_template", "tool_format", "draft_model", "rerank_output", "lora", "mmproj")
"""Keys of a table that can be wrong each by itself."""
_STAND_IN = "fake:"
_ANY_HASH = "0" * 64


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
    site = document.pop(TABLE, {})
    errors: list[StokerError] = [*mistakes_of(document), *mistakes_of_ray(site)]
    places = [error.param or "" for error in errors]
    left_out = ["keys" if place.startswith("keys.") else place for place in places]  # a key needs its hash
    left_out.append(TABLE)
    while True:
        try:
            engine, server = load_settings({}, path, left_out)
        except StokerError as error:
            errors.append(error)
            if not error.param or error.param in left_out:
                break
            left_out.append(error.param)
        else:
            errors += [*_unserved(engine, document.get("keys")), *_unreachable(server)]
            break
    return [_problem(text, error, path) for error in errors]


def _unreachable(server: ServerSettings) -> Iterator[StokerError]:
    """What is wrong with key files and addresses."""
    for name, file in (("api_key_file", server.api_key_file), ("admin_key_file", server.admin_key_file)):
        try:
            KeyRing.read(file)
        except StokerError as error:
            yield error_from_info(msgspec.structs.replace(error.info(), param=name))
    try:
        check_addresses(server)
    except StokerError as error:
        yield error


# ---------------------------------------------------------------- models


def _unserved(engine: EngineSettings, keys: object) -> Iterator[StokerError]:
    """Why models cannot be served, each by itself and then together, and models of keys that are not."""
    try:
        check_backend(engine.backend)
    except InvalidRequestError as unknown:  # each of the models would say so again
        yield unknown
        engine = engine.replace(backend=AUTO)
    names = {name for table in engine.model_tables for name in _names_of(engine, table)}
    tables, refs = {}, []
    for name, table in engine.model_tables.items():
        errors, right = _checked(engine, name, table)
        yield from errors
        if right is not None:
            tables[name] = right
    for ref in engine.models:
        if ref in engine.model_tables:
            refs += [ref] if ref in tables else []
        elif error := _why_not(engine.replace(models=(ref,), model_tables={}, **_OF_NO_TABLE)):
            yield error_from_info(msgspec.structs.replace(error.info(), param=error.param or "models"))
            names |= {ref, Path(ref).stem}
        else:
            refs.append(ref)
    if refs or tables or not (engine.models or engine.model_tables):
        together = yield from _wrong_together(engine.replace(models=tuple(refs), model_tables=tables))
        names |= _served(together) or {name for ref in refs for name in (ref, Path(ref).stem)}
    if names:
        yield from _strangers(keys, names)


def _names_of(engine: EngineSettings, name: str) -> list[str]:
    """Under which a table's model and its adapters are served once nothing is wrong with it."""
    table = engine.model_tables[name]
    return [name, *table.aliases, *(text.partition("=")[0].strip() for text in (*table.lora, *engine.lora))]


def _why_not(engine: EngineSettings) -> StokerError | None:
    """Why the models of the settings cannot be served."""
    try:
        ModelSource.read(engine)
    except StokerError as error:
        return error
    return None


def _checked(
    engine: EngineSettings, name: str, table: ModelSettings
) -> tuple[list[StokerError], ModelSettings | None]:
    """What is wrong with a table, key by key, and the table without that; None: nothing of it is right.

    A model whose file is wrong has a stand-in, so that its names count and what goes with it is read.
    """

    def why_not(changed: ModelSettings) -> StokerError | None:
        return _why_not(engine.replace(models=(name,), model_tables={name: changed}, **_OF_NO_TABLE))

    given = {field: value for field in _BESIDE_A_FILE if (value := getattr(table, field)) not in (None, ())}
    right = table.replace(**{field: ModelSettings.model_fields[field].default for field in given})
    errors, right = _of_ways(name, right, why_not)
    has_file = why_not(right) is None
    if not has_file:
        right = right.replace(file=_STAND_IN)
        if why_not(right):
            return errors, None
    for field, value in given.items():
        reads_alone = field in _FITTED and not has_file
        parts = [(one,) for one in value] if isinstance(value, tuple) else [value]
        if reads_alone:
            found = [_unread(name, field, part) for part in parts]
        else:
            found = [why_not(right.replace(**{field: part})) for part in parts]
            right = right if any(found) else right.replace(**{field: value})
        errors += filter(None, found)
    return errors, right


def _of_ways(
    name: str, table: ModelSettings, why_not: Callable[[ModelSettings], StokerError | None]
) -> tuple[list[StokerError], ModelSettings]:
    """What is wrong with a table's file and its fallback, each by itself, and the table to go on with.

    A backend that only this machine lacks is no mistake where the other of the two serves.
    """
    together, place = why_not(table), f"models.{name}.fallback"
    if table.fallback is None:
        return [together] if together else [], table
    alone = table.replace(fallback=None)
    errors = [why_not(alone)]
    if together is not None and together.param == place:
        return [error for error in (*errors, together) if error], alone
    if error := why_not(alone.replace(file=table.fallback)):
        text = error.message.removeprefix(f"{error.param}: ")
        info = msgspec.structs.replace(error.info(), message=f"{place}: {text}", param=place)
        errors.append(error_from_info(info))
    found = [error for error in errors if error]
    if together is None:
        found = [error for error in found if not isinstance(error, BackendUnavailableError)]
    return found or ([together] if together else []), table


def _unread(name: str, field: str, value: Any) -> StokerError | None:
    """Why an adapter or a projector is none, whatever model it is for."""
    try:
        if field == "mmproj":
            read_projector(value)
        else:
            read_adapter(parse_adapter(value[0]).path)
    except StokerError as error:
        place = f"models.{name}.{field}"
        text = error.message.removeprefix(f"{field}: ")
        return error_from_info(msgspec.structs.replace(error.info(), message=f"{place}: {text}", param=place))
    return None


def _wrong_together(engine: EngineSettings) -> Generator[StokerError, None, EngineSettings]:
    """What is wrong with settings beside the tables, and with names; returns the settings without that."""
    while error := _why_not(engine):
        setting = error.param or ""
        value = getattr(engine, setting) if setting in _OF_NO_TABLE else None
        parts = value if isinstance(value, tuple) else ()
        alone = [_why_not(engine.replace(**_OF_NO_TABLE | {setting: (part,)})) for part in parts]
        yield from [each for each in alone if each] or [error]
        smaller = _without(engine, setting)
        if smaller is None:
            break
        engine = smaller
    return engine


def _without(engine: EngineSettings, place: str) -> EngineSettings | None:
    """The settings without what is wrong there; None: it cannot be taken out."""
    if place in _OF_NO_TABLE and getattr(engine, place) != _OF_NO_TABLE[place]:
        return engine.replace(**{place: _OF_NO_TABLE[place]})
    for name, table in engine.model_tables.items():
        others = {each: kept for each, kept in engine.model_tables.items() if each != name}
        for field in ("aliases", "lora"):
            if place == f"models.{name}.{field}" and getattr(table, field):
                changed = table.replace(**{field: ()})
                return engine.replace(model_tables=engine.model_tables | {name: changed})
        if place == f"models.{name}" and others:
            refs = tuple(ref for ref in engine.models if ref != name)
            return engine.replace(models=refs, model_tables=others)
    return None


def _served(engine: EngineSettings) -> set[str]:
    """Names of the models that the settings serve; empty: they serve none."""
    try:
        infos = [model.info for model in ModelSource.read(engine).served]
    except StokerError:
        return set()
    return {name for one in infos for name in (one.id, *one.aliases, *(each.name for each in one.adapters))}


def _strangers(keys: object, served: set[str]) -> Iterator[StokerError]:
    """Models of keys that are not served; those of the hub may be pulled later."""
    for name, table in keys.items() if isinstance(keys, dict) else ():
        try:
            models = KeySettings(hash=_ANY_HASH, models=table["models"]).models
        except (TypeError, KeyError, StokerError):
            continue  # it names none, or is told of already
        for model in models:
            if model not in served and "/" not in model:
                text = f"no model {model!r} is served; there are: {', '.join(sorted(served))}"
                yield InvalidRequestError(text, param=f"keys.{name}.models")


# ---------------------------------------------------------------- lines


def _problem(text: str, error: StokerError, path: Path) -> Problem:
    key = error.param or ""
    told = error.message.removeprefix(f"{key} in {path}: ").removeprefix(f"{key}: ")
    return Problem(line_of(text, key), key, told)


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
