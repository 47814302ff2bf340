"""Imports run one way: a room knows the rooms below it, never its users or neighbours."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import stoker
from syntax_trees import tree_of

SOURCE = Path(stoker.__file__).parent

# What each room may import, besides itself. A module's room is its longest prefix here; a folder that is
# not named belongs to the room above it.
BASE = {"errors", "wording", "private", "native_crash", "base64_text", "json_size"}
ALLOWED = {
    "": {
        "audio",
        "documents",
        "errors",
        "events",
        "images",
        "ipc",
        "client",
        "models",
        "remote",
        "runtime",
        "settings",
        "sync",
        "tasks",
    },
    "events": {"client", "ipc"},  # exports, as those of the package
    "errors": set[str](),
    "wording": set[str](),
    "private": set[str](),
    "native_crash": {"private"},
    "base64_text": set[str](),
    "json_size": set[str](),
    "setting_fields": {"errors", "wording"},
    "site_settings": {"errors", "wording", "setting_fields", "ipc"},
    "settings": {"errors", "wording", "setting_fields", "site_settings"},
    "ipc": {"errors"},
    # ---- what the engine is made of
    "machine": BASE,
    "backends.protocol": {"errors", "ipc"},
    "backends.cell_map": {"errors"},
    "backends.device": {"machine"},
    "backends.expert_pages": BASE | {"ipc", "machine", "models", "backends.protocol"},
    "models": BASE | {"ipc", "backends.protocol", "backends.device"},
    "backends": BASE
    | {"ipc", "models", "backends.protocol", "backends.cell_map", "backends.device"}
    | {"backends.expert_pages", "backends.trial"},
    "backends.registry": {"models", "errors"},  # backends by name
    "backends.trial": BASE | {"ipc", "models", "backends.protocol", "backends.registry"},
    "models.store": BASE | {"ipc", "models", "backends.registry"},
    "cache": BASE | {"ipc", "machine"},
    "kv": {"errors", "ipc", "backends.protocol", "cache"},
    "scheduler": {"errors", "ipc", "backends.protocol", "cache", "kv"},
    "grammar": {"errors", "ipc", "backends.protocol"},
    "sampling": {"errors", "ipc", "backends.protocol", "grammar"},
    "speculation": {"ipc", "backends.protocol", "kv", "scheduler"},
    "engine": BASE
    | {"ipc", "settings", "machine", "models", "backends", "backends.protocol", "backends.registry"}
    | {"backends.trial", "backends.device", "cache", "kv", "scheduler", "grammar", "sampling", "speculation"},
    # ---- what the caller's process is made of
    "chat": {"errors", "json_size"},
    "audio": BASE | {"ipc", "settings"},
    "images": BASE | {"ipc", "settings", "machine", "audio"},
    "documents": BASE | {"ipc", "settings", "chat", "images"},
    "power": {"errors"},
    "routing": {"errors", "ipc", "machine"},
    "client.worker": {"errors", "wording", "ipc", "chat", "documents", "grammar"},
    "client": BASE
    | {"ipc", "settings", "site_settings", "chat", "audio", "images", "machine", "models", "models.store"}
    | {"backends.registry", "backends.trial", "client.worker", "documents"},
    "tasks": {
        "errors",
        "ipc",
        "settings",
        "setting_fields",
        "site_settings",
        "chat",
        "audio",
        "images",
        "models",
        "client",
        "client.worker",
    },
    "remote": {
        "errors",
        "ipc",
        "settings",
        "chat",
        "audio",
        "documents",
        "images",
        "models",
        "client",
        "tasks",
    },
    "runtime": {
        "errors",
        "ipc",
        "settings",
        "chat",
        "audio",
        "images",
        "client",
        "tasks",
        "remote",
        "engine",
    },  # brings them together
    "gate": {
        "errors",
        "ipc",
        "settings",
        "chat",
        "client",
        "remote",
        "routing",
        "runtime",
    },  # other machines in the place of an engine
    "ray.site": {"errors", "settings", "setting_fields", "site_settings"},  # read where Ray is not
    "ray.autoscaling": {"ipc"},
    "ray": {
        "errors",
        "gate",
        "ipc",
        "ray.autoscaling",
        "ray.site",
        "remote",
        "runtime",
        "server",
        "settings",
    },
    "sync": {"errors", "images", "ipc", "settings", "client", "runtime", "tasks"},
    "llm_plugin": {"errors", "ipc", "settings", "models.store", "sync"},
    "server": BASE
    | {
        "",
        "ipc",
        "settings",
        "setting_fields",
        "site_settings",
        "chat",
        "audio",
        "documents",
        "images",
        "power",
        "client",
        "tasks",
        "remote",
        "runtime",
    },
    "cli": BASE
    | {
        "",
        "ipc",
        "settings",
        "site_settings",
        "cache",
        "chat",
        "audio",
        "documents",
        "images",
        "machine",
        "models",
        "models.store",
        "backends",
    }
    | {"backends.device", "backends.registry", "backends.trial", "client", "tasks", "runtime", "remote"}
    | {"server", "gate", "ray", "ray.site"},
}
# Policy is pure: time arrives as an argument, effects leave as values.
PURE = (
    "scheduler",
    "kv",
    "cache.prefix_cache",
    "cache.radix",
    "cache.entry",
    "cache.eviction",
    "cache.disk.tier",
    "cache.shared.names",
    "cache.shared.rule",
    "cache.shared.tier",
    "speculation",
    "routing",
    "ray.autoscaling",
    "machine.ladder",
    "machine.pressure",
    "models.memory_estimate.fit",
    "engine.residency.catalogue",
    "engine.runners.queue",
    "engine.runners.turns",
    "engine.threads.governor",
)
IMPURE = {"asyncio", "ctypes", "logging", "mlx", "threading", "time"}
NATIVE = {"llama_cpp", "mlx", "stoker.backends.llama.binding", "stoker.backends.fake.backend"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by its name below `stoker`, parsed."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name, tree_of(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Absolute names of what a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written absolutely"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room that a module name below `stoker` belongs to."""
    fits = [key for key in ALLOWED if name == key or name.startswith(f"{key}.")]
    return max(fits, key=len, default="")


def test_every_room_imports_only_the_rooms_below_it() -> None:
    """Cli, server -> runtime -> tasks -> client -> ipc; engine -> scheduler -> kv -> cache."""
    wrong = []
    for name, tree in modules():
        own = room(name)
        for target in imported(tree):
            if target.split(".")[0] != "stoker":
                continue
            other = room(target.removeprefix("stoker").removeprefix("."))
            if other != own and other not in ALLOWED[own]:
                wrong.append(f"{name} ({own}) imports {target} ({other})")
    assert not wrong, "\n".join(wrong)


def test_client_and_engine_know_nothing_of_each_other() -> None:
    """Two processes; what both speak is `ipc`."""
    ways = {("client", "engine"), ("engine", "client")}
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules()
        for target in imported(tree)
        if (name.split(".")[0], target.removeprefix("stoker.").split(".")[0]) in ways
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_belongs_to_a_room() -> None:
    """A new room is entered in the table before it is used."""
    rooms = {room(name).split(".")[0] for name, _ in modules()}
    tops = {name.split(".")[0] for name, _ in modules()}
    assert tops == rooms


def test_policy_reads_no_clock_and_has_no_effects() -> None:
    """Scheduler and policy import no asyncio, logging, time, ctypes."""
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules()
        if name.startswith(PURE)
        for target in imported(tree)
        if target.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_front_loads_no_native_code() -> None:
    """The client survives anything the engine does: it imports no bindings, nor the engine."""
    code = (
        "import sys, typer, stoker, stoker.runtime, stoker.sync, stoker.cli.app, stoker.server.serve\n"
        "assert len([*typer.main.get_command(stoker.cli.app.app).commands.values()]) > 20\n"
        f"print([name for name in sys.modules if name in {NATIVE | {'stoker.engine'}!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
