"""What a process loads that it does not need makes its start slower and takes memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from syntax_trees import tree_of

ENGINE = """
from stoker.engine.process import load_native
load_native()
import stoker.engine.loop, stoker.backends.llama.backend
"""
WORKER = "import stoker.client.worker.jobs"
COMMAND = """
import typer
from stoker.cli.app import app
assert len([*typer.main.get_command(app).commands.values()]) > 20
"""
BEFORE_A_COMMAND = "import stoker.cli.main, stoker.client.process.child"
WITHOUT_A_BUS = """
import asyncio, os, pathlib
from stoker.power import sleep
sleep.BUS_SOCKET = pathlib.Path("/dev/null/none")
os.environ.pop(sleep.BUS_VARIABLE, None)
asyncio.run(sleep.SleepWatch(None).run())
"""
SERVER = "import stoker.cli.app, stoker.cli.commands.serve, stoker.cli.serve_screen, stoker.server.service"
FRONT = {"fastapi", "starlette", "uvicorn", "httpx", "pydantic", "pydantic_settings", "typer", "rich"}
SETTINGS = {"pydantic", "pydantic_settings", "typer"}
RARE = {"PIL", "jinja2", "safetensors", "rich", "prompt_toolkit", "huggingface_hub"}
"""What a server needs for some requests only, in other processes, or on a terminal."""


def loaded_by(program: str) -> set[str]:
    """Top names of what a fresh process has imported after the program."""
    code = f"{program}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("program", "needs_not"),
    [
        (
            ENGINE,
            FRONT | {"PIL", "jinja2", "jsonschema", "asyncio", "diskcache", "llguidance", "safetensors"},
        ),
        (WORKER, FRONT | {"PIL", "numpy", "psutil", "safetensors"}),
        ("import stoker", FRONT | {"PIL", "numpy", "msgspec"}),
        (BEFORE_A_COMMAND, FRONT | RARE | {"asyncio", "msgspec", "numpy"}),
        (COMMAND, FRONT - SETTINGS | RARE | {"jsonschema", "numpy"}),
        (
            "import stoker.runtime, stoker.server.serve",
            {"fastapi", "starlette", "uvicorn", "httpx", "jsonschema", "numpy"} | RARE,
        ),
        (WITHOUT_A_BUS, {"dbus_fast"}),
        (SERVER, {"httpx", "jsonschema", "numpy"} | RARE),
    ],
    ids=[
        "engine",
        "worker",
        "library",
        "before a command",
        "command",
        "server until models load",
        "machine without a bus",
        "server",
    ],
)
def test_a_process_imports_nothing_that_it_does_not_need(program: str, needs_not: set[str]) -> None:
    """L10: settings, HTTP, images and templates are the client's; the library loads what is used of it."""
    assert loaded_by(program) & needs_not == set()


def test_a_name_of_the_library_is_imported_from_where_a_type_checker_sees_it() -> None:
    """I9: the names found late are those of `__all__`, each in the module that is written for checkers."""
    tree = tree_of(Path(stoker.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    written = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(written) == sorted(stoker.__all__)
    for name, module in written.items():
        found = getattr(stoker, name)
        assert found is getattr(sys.modules[str(module)], name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        stoker.Nothing  # noqa: B018 - it is asked for
