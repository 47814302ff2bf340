"""The shape of the code: short files and functions, small classes and folders, one meaning for one name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 25
MAX_MODULES = 15
MIN_MODULE_LINES = 60
APART = "Apart because"
"""With these words a short module's docstring says why it is a module, where only one other imports it."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MIRRORS = "src/stoker/sync.py"

FACADES = {"src/stoker/runtime.py:Runtime", "src/stoker/remote/runtime.py:RemoteRuntime"}
"""What an application may call is its public names; it holds no state but the client's."""


@cache
def sources() -> tuple[tuple[str, str, ast.Module], ...]:
    """Path, text and tree of every file that ships or builds."""
    paths = [path for folder in ("src", "tools", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]
    return tuple((name, text, tree_of(text)) for name, text in texts)


def shipped() -> Iterator[tuple[str, str, ast.Module]]:
    """Those of `sources` that ship."""
    return (source for source in sources() if source[0].startswith("src/"))


def long_files() -> set[str]:
    """Past that a file hides a second noun."""
    return {name for name, text, _ in sources() if text.count("\n") > MAX_FILE_LINES}


def long_functions() -> set[str]:
    """Past that a function hides a second verb."""
    return {
        f"{name}:{node.name}"
        for name, _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    }


def large_classes() -> set[str]:
    """Past that a class hides a second owner. Properties count; a setter is its property."""
    return {
        f"{name}:{node.name}"
        for name, _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(_public_methods(node)) > MAX_PUBLIC_METHODS
    }


def _public_methods(node: ast.ClassDef) -> set[str]:
    methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    return {method.name for method in methods if not method.name.startswith("_")}


def large_folders() -> set[str]:
    """Past that a folder hides a second room. What lies in its folders is theirs."""
    folders = Counter(str(Path(name).parent) for name, _, _ in shipped() if not name.endswith("__init__.py"))
    return {folder for folder, number in folders.items() if number > MAX_MODULES}


def repeated_classes() -> set[str]:
    """One name means one thing, private or not; the synchronous façade repeats those that it mirrors."""
    names = Counter(
        node.name
        for name, _, tree in shipped()
        if name != MIRRORS
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, number in names.items() if number > 1}


def satellites() -> set[str]:
    """Short modules of one importer belong into it, unless their docstring says why they stand apart."""
    importers = defaultdict(set)
    for name, _, tree in shipped():
        for module in _imported(tree):
            importers[module].add(name)
    return {
        name
        for name, text, tree in shipped()
        if text.count("\n") < MIN_MODULE_LINES
        and Path(name).stem not in ("__init__", "__main__")
        and len(importers[_module(name)]) == 1
        and APART not in (ast.get_docstring(tree) or "")
    }


def _module(name: str) -> str:
    return name.removeprefix("src/").removesuffix(".py").replace("/", ".")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


RULES: dict[str, Callable[[], set[str]]] = {
    "file": long_files,
    "function": long_functions,
    "class": large_classes,
    "folder": large_folders,
    "class name": repeated_classes,
    "satellite": satellites,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_gate(rule: str) -> None:
    """Everything keeps to the rule; the façade alone has more methods than a class may."""
    assert sorted(RULES[rule]() - FACADES) == []


def test_no_module_has_a_vague_name() -> None:
    """A module is named after its noun."""
    assert [name for name, _, _ in sources() if Path(name).stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_owns() -> None:
    """Each file starts with a docstring; an empty one has nothing to own."""
    silent = [name for name, text, tree in sources() if text.strip() and not ast.get_docstring(tree)]
    assert silent == []


def test_packages_hold_exports_only() -> None:
    """`__init__.py` defines neither functions nor classes, but for those by which exports are found late."""
    busy = [
        name
        for name, _, tree in sources()
        if name.endswith("__init__.py")
        and any(
            isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in {"__getattr__", "__dir__"}
            for node in tree.body
        )
    ]
    assert busy == []
