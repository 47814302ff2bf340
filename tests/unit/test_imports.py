"""Imports run one way: a room knows the rooms below it, never its users or neighbours."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import stoker

SOURCE = Path(stoker.__file__).parent

# What each room may import, besides itself. A module's room is its longest prefix here.
WORDS = {"errors", "constraint", "request", "values", "messages", "status"}
# What a backend hands out besides itself; the protocol names them.
VIEWS = {"backends.scored", "backends.seeing"}
ALLOWED = {
    "": WORDS | {"runtime", "settings", "sync", "streams", "images", "reading"},  # exports
    "errors": set[str](),
    "constraint": {"errors"},
    "request": {"errors", "constraint"},
    "values": set[str](),
    "private": set[str](),
    "base64_text": set[str](),
    "json_size": set[str](),
    "native_crash": {"private"},
    "messages": {"errors", "request", "values"},
    "status": {"request"},
    "settings": {"errors"},
    "backends.protocol": WORDS | VIEWS,
    "backends.scored": WORDS | {"backends.protocol"},
    "backends.seeing": WORDS | {"backends.protocol"},
    "memory.ledger": set[str](),
    "cache": WORDS | {"private", "memory.ledger"},
    "scheduler": WORDS | {"backends.protocol", "cache", "memory.ledger"},
    "memory.verdict": WORDS,
    "memory": WORDS | {"private", "memory.verdict"},
    "lifecycle": WORDS | {"private", "settings"},
    "decode": WORDS | {"backends.protocol"},
    "chat": {"errors", "json_size"},
    "images": WORDS | {"settings", "memory", "base64_text"},
    "models": WORDS | {"private", "backends.protocol", "memory.verdict"},
    "backends": WORDS | VIEWS | {"private", "native_crash", "backends.protocol", "models", "memory.verdict"},
    "engine": WORDS
    | VIEWS
    | {"native_crash", "backends.protocol", "backends", "scheduler", "cache", "decode", "models"}
    | {"memory", "memory.ledger", "memory.verdict", "settings", "streams"},
    "streams": WORDS,
    "fields": WORDS,
    "llm_plugin": WORDS | {"settings", "models", "sync"},
    "texts": WORDS,
    "worker": WORDS | {"chat", "decode"},
    "chatting": WORDS | {"chat", "streams", "images", "worker"},
    "tensor_call": WORDS | {"streams"},
    "embeddings": WORDS | {"fields", "tensor_call"},
    "reranking": WORDS | {"fields", "tensor_call", "embeddings"},
    "choosing": WORDS | {"fields", "tensor_call", "embeddings"},
    "states": WORDS | {"models", "streams", "fields"},
    "front": WORDS
    | {"settings", "engine", "memory", "streams", "fields", "embeddings", "lifecycle", "images"}
    | {"chat", "worker"},
    "runtime": WORDS
    | {"settings", "engine", "chat", "models", "memory", "streams", "fields", "states", "embeddings"}
    | {"lifecycle", "texts", "reranking", "front", "choosing", "chatting", "images", "reading"},
    "reading": WORDS | {"images", "fields", "streams", "chatting"},
    "sync": WORDS
    | {"settings", "runtime", "streams", "states", "embeddings", "reranking", "choosing"}
    | {"reading", "images"},
    "server": WORDS
    | {
        "",
        "private",
        "settings",
        "runtime",
        "streams",
        "chat",
        "states",
        "embeddings",
        "reranking",
        "lifecycle",
    }
    | {"choosing", "chatting", "images", "base64_text", "json_size"},
    "cli": WORDS
    | {
        "",
        "private",
        "settings",
        "runtime",
        "streams",
        "server",
        "models",
        "memory",
        "memory.verdict",
        "backends",
    }
    | {"cache", "chat", "embeddings", "reranking", "choosing", "images", "reading"},
}
# Policy is pure: time arrives as an argument, effects leave as values.
PURE = (
    "scheduler",
    "cache",
    "memory.policy",
    "memory.pressure",
    "memory.verdict",
    "memory.residency",
    "memory.swaps",
    "engine.text_line",
    "engine.fair_turns",
    "engine.governor",
)
IMPURE = {"asyncio", "ctypes", "logging", "mlx", "threading", "time"}
NATIVE = {"llama_cpp", "mlx", "stoker.backends.llama"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by its name below `stoker`, parsed."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


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
    """Cli, server -> runtime -> engine -> scheduler, memory, decode -> protocol, messages, errors."""
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


def test_every_module_belongs_to_a_room() -> None:
    """A new room is entered in the table before it is used."""
    rooms = {room(name).split(".")[0] for name, _ in modules()}
    tops = {name.split(".")[0] for name, _ in modules()}
    assert tops == rooms


def test_policy_reads_no_clock_and_has_no_effects() -> None:
    """ARCHITECTURE: scheduler and policy import no asyncio, logging, time, ctypes."""
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules()
        if name.startswith(PURE)
        for target in imported(tree)
        if target.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_front_loads_no_native_code() -> None:
    """ARCHITECTURE: the front survives anything the engine does, so it never imports the bindings."""
    code = (
        "import sys, stoker, stoker.runtime, stoker.sync, stoker.cli.main, stoker.server.serve\n"
        f"print([name for name in sys.modules if name in {NATIVE!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
