"""The shape of the code: short files, short functions, packages that say what they own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of every file that ships or builds."""
    for folder in ("src", "tools", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_no_file_is_longer_than_600_lines() -> None:
    """Past that a file hides a second noun."""
    long = [(name, text.count("\n")) for name, text in sources() if text.count("\n") > MAX_FILE_LINES]
    assert long == []


def test_no_function_is_longer_than_60_lines() -> None:
    """Past that a function hides a second verb."""
    long = [
        (f"{name}:{node.lineno}", node.name)
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_module_has_a_vague_name() -> None:
    """A module is named after its noun."""
    assert [name for name, _ in sources() if Path(name).stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_owns() -> None:
    """Each file starts with a docstring; an empty one has nothing to own."""
    silent = [name for name, text in sources() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_packages_hold_exports_only() -> None:
    """STYLE 3: `__init__.py` defines neither functions nor classes."""
    busy = [
        name
        for name, text in sources()
        if name.endswith("__init__.py")
        and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(text).body)
    ]
    assert busy == []
