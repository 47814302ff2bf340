"""The file of a site: what `stoker serve` takes, and the table `[ray]` of its replicas.

Needs no Ray: a file is checked, and its values are made, on any machine. What is deployed of it is
`stoker.ray.deploy`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from stoker.errors import InvalidRequestError
from stoker.setting_fields import FrozenSettings, setting
from stoker.settings import EngineSettings, ServerSettings, load_settings, settings_text, toml_problem
from stoker.site_settings import PerModelSettings

TABLE = "ray"
MAX_REPLICAS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OF_REPLICAS = PerModelSettings.model_fields.keys() | {
    "chat_template",
    "draft_model",
    "lora",
    "mmproj",
    "model_tables",
    "models",
    "placement",
    "rerank_output",
}
"""Settings of an engine that say nothing to a door."""
_FILE = re.compile(r"[/.]")
"""What a name of a model that is a file has."""
S = TypeVar("S", EngineSettings, ServerSettings)


def _name(value: object) -> object:
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise ValueError(f"{value!r} is no name of an application: letters, digits, -, _ and ., 64 at most")
    return value


def _resources(value: object) -> object:
    if not isinstance(value, Mapping):
        raise ValueError("a table is taken, such as { rack_a = 1 }")  # noqa: TRY004 - pydantic's
    for name, amount in value.items():
        if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 <= amount < float("inf"):
            raise ValueError(f"{name}: {amount!r} is no amount; a number from 0 on is taken")
        if name in {"CPU", "GPU", "memory"}:
            raise ValueError(f"{name} is no resource of one's own; cpus and gpus say how many a replica gets")
    return {str(name): float(amount) for name, amount in value.items()}


class Ingress(StrEnum):
    """How HTTP comes to the doors: as the cluster is, at a port of each, or through Ray's proxies."""

    AUTO = "auto"
    DOOR = "door"
    PROXY = "proxy"


class RaySettings(FrozenSettings):
    """The table `[ray]`: how many replicas there are, and what each takes of the cluster.

    Attributes:
        name: of the application; another name is another site of the same cluster.
        max_replicas: None: as `min_replicas`, so the number does not change.
        ingress: with `door` each door listens at the site's port on its machine, with `proxy` Ray's proxies
            do on every machine of the cluster; `auto`: the first where the cluster is one machine.
        gpus: a part such as 0.5 is shared with others.
        resources: of the cluster's own, such as those that name a kind of machine.
        scale_wait_s, scale_load: see `stoker.ray.autoscaling.ScaleRule`.
        scale_for_background: else background work alone brings no replica.
        scale_out_after_s, scale_in_after_s: so long it has to be so.
        surge_percent: in an update, of all replicas; new ones start before old ones stop. 0: each old one
            stops before the new one starts, which needs no further machine.
        stop_s: past it what is left is cut short.
    """

    name: Annotated[str, BeforeValidator(_name)] = setting("stoker", "Name of the application.")
    min_replicas: int = setting(1, "Replicas that are always there.", ge=1, le=MAX_REPLICAS)
    max_replicas: int | None = setting(
        None, "Replicas at most.", shown="as min_replicas", ge=1, le=MAX_REPLICAS
    )
    doors: int = setting(1, "Doors: programs that answer HTTP.", ge=1, le=MAX_REPLICAS)
    ingress: Ingress = setting(Ingress.AUTO, "How HTTP comes to the doors.")
    cpus: float = setting(1.0, "CPUs that a replica reserves.", ge=0, lt=1e6)
    gpus: float = setting(0.0, "GPUs that a replica gets.", ge=0, lt=1e6)
    resources: Annotated[dict[str, float], BeforeValidator(_resources)] = setting(
        {}, "Custom resources that a replica reserves.", shown="none"
    )
    door_cpus: float = setting(1.0, "CPUs that a door reserves.", ge=0, lt=1e6)
    scale_wait_s: float = setting(
        5.0, "One more replica where a person would wait longer for a slot.", gt=0, le=86_400
    )
    scale_load: float = setting(
        0.8, "One more replica past so many interactive requests a slot.", gt=0, le=1000
    )
    scale_for_background: bool = setting(default=False, text="Background work brings replicas too.")
    scale_out_after_s: float = setting(10.0, "Seconds until one more is started.", ge=0, le=86_400)
    scale_in_after_s: float = setting(300.0, "Seconds until one is stopped.", ge=0, le=86_400)
    surge_percent: int = setting(0, "Replicas of an update beside those that are there.", ge=0, le=100)
    stop_s: float = setting(600.0, "Seconds that what is stopped has to end its work.", ge=1, le=86_400)

    @property
    def most_replicas(self) -> int:
        """Replicas at most."""
        return self.max_replicas or self.min_replicas


def read_ray(table: object) -> RaySettings:
    """The table `[ray]` of a file.

    Raises:
        InvalidRequestError: it is none, or a key or a value is wrong; `param` is such as `ray.cpus`.
    """
    if not isinstance(table, Mapping):
        raise InvalidRequestError("ray: a table is taken: [ray]", param=TABLE)
    try:
        found = RaySettings(**{str(key).replace("-", "_"): value for key, value in table.items()})
    except InvalidRequestError as error:
        place = f"{TABLE}.{error.param}"
        raise InvalidRequestError(f"{TABLE}.{error.message}", param=place) from None
    if found.most_replicas < found.min_replicas:
        text = f"ray.max_replicas: {found.max_replicas} is less than min_replicas, {found.min_replicas}"
        raise InvalidRequestError(text, param="ray.max_replicas")
    return found


def mistakes_of_ray(table: object) -> Iterator[InvalidRequestError]:
    """What is wrong with the table, key by key, and then together."""
    errors = []
    for key, value in table.items() if isinstance(table, Mapping) else ():
        try:
            read_ray({"min_replicas": 1, key.replace("-", "_"): value})
        except InvalidRequestError as error:
            errors.append(error)
    if not errors:
        try:
            read_ray(table)
        except InvalidRequestError as error:
            errors.append(error)
    yield from errors


@dataclass(frozen=True, slots=True)
class RaySite:
    """What a file of a site says.

    Attributes:
        engine: of each replica.
        server: of the doors; host and port are those of Ray's proxies where HTTP comes through these.
        ray: how many of them there are.
    """

    engine: EngineSettings
    server: ServerSettings
    ray: RaySettings

    def as_args(self) -> dict[str, Any]:
        """What was given, as JSON can hold it; `site_of` reads it on any machine of the cluster."""
        return {
            name: getattr(self, name).model_dump(mode="json", exclude_unset=True)
            for name in ("engine", "server", "ray")
        }

    def replica_engine(self) -> EngineSettings:
        """Settings of the engine as a replica has them: it comes with the default model loaded.

        Else one that comes for people who wait would get none of them: requests go where their model is.
        """
        name = self.engine.default_table
        table = self.engine.model_tables.get(name or "")
        if name is None or table is None or "load" in table.model_fields_set:
            return self.engine
        return self.engine.replace(model_tables=self.engine.model_tables | {name: table.replace(load=True)})

    def door_engine(self) -> EngineSettings:
        """Settings of the engine as a door has them: without those of models, which its replicas tell."""
        given = self.engine.model_dump(exclude_unset=True)
        return EngineSettings(**{name: value for name, value in given.items() if name not in _OF_REPLICAS})

    def with_ingress(self, ingress: Ingress) -> RaySite:
        """The same site whose doors are reached so."""
        return dataclasses.replace(self, ray=self.ray.replace(ingress=ingress))


def site_of(args: Mapping[str, Any]) -> RaySite:
    """A site of what `RaySite.as_args` gave. Raises InvalidRequestError."""
    if strange := sorted(args.keys() - {"engine", "server", "ray"}):
        text = f"args: a site has no {strange[0]!r}; `stoker ray config` writes what it has"
        raise InvalidRequestError(text, param="args")
    return RaySite(
        EngineSettings(**args.get("engine", {})),
        ServerSettings(**args.get("server", {})),
        read_ray(args.get("ray", {})),
    )


def read_site(path: Path) -> RaySite:
    """The site of a file, with `STOKER_*` before the file's own values, as every command has them.

    Files that it names relative to here are absolute in it: replicas run elsewhere.

    Raises:
        InvalidRequestError: a key or a value is wrong; the message names the file.
        MachineSetupError: the file cannot be read.
    """
    try:
        table = tomllib.loads(settings_text(path)).get(TABLE, {})
        ray = read_ray(table)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is {toml_problem(error)}", param="config") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}", param=error.param) from None
    engine, server = load_settings({}, path, (TABLE,))
    return RaySite(_settled(engine), _settled(server), ray)


def digest_of(*parts: object) -> str:
    """A text that is equal for equal parts and this release: what is deployed again and equal stays."""
    text = json.dumps([version("stoker"), *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# ---------------------------------------------------------------- files


def _settled(settings: S) -> S:
    """The settings with absolute paths in place of those relative to here that exist."""
    given = settings.model_dump(exclude_unset=True)
    return type(settings)(**{name: _absolute(value) for name, value in given.items()})


def _absolute(value: Any) -> Any:
    match value:
        case Path():
            return value.absolute()
        case str():
            return _absolute_file(value)
        case tuple() | list():
            return tuple(_absolute(each) for each in value)
        case dict():
            return {key: _absolute(each) for key, each in value.items()}
    return value


def _absolute_file(text: str) -> str:
    """A file, or one behind a name as in `NAME=FILE@SCALE`, made absolute; any other text as it is."""
    head, equals, rest = text.rpartition("=")
    file, at, scale = rest.partition("@")
    path = Path(file).expanduser()
    return f"{head}{equals}{path.absolute()}{at}{scale}" if _FILE.search(file) and path.is_file() else text
