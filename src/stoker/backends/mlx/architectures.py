"""Which architectures the installed mlx-lm computes, found by its files: nothing of it is imported.

Importing mlx-lm takes seconds and hundreds of megabytes, and the caller's process describes models too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.mlx.vision.families import FAMILIES, text_type
from stoker.errors import UnsupportedError

if TYPE_CHECKING:
    from stoker.models.folders.folder import ModelFolder

PACKAGE = "mlx_lm"
_TOKENS = ("token_id", "token_ids", "token_index")
"""Names of ids, of which a config may hold several in a list."""
_EPSILONS, _ROPE_BASE = ("norm_eps", "norm_epsilon"), "rope_theta"
_MAX_SHOWN = 64
_REMAPPING = "MODEL_REMAPPING"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CLASSES = (re.compile(r"^class Model\b", re.MULTILINE), re.compile(r"^class ModelArgs\b|\bModelArgs\b"))


@dataclass(frozen=True, slots=True)
class Argument:
    """A value that a model reads of its config: how it is annotated, and whether it has to be there."""

    annotation: str
    is_required: bool

    def why_not(self, value: object) -> str:
        """What it has to be in place of a value; empty: that will do, or nothing is known against it."""
        if self.annotation in {"int", "float"} and isinstance(value, str | list | dict):
            return "a number"
        is_object = self.annotation.removeprefix("Optional[").startswith(("Dict", "dict"))
        if is_object and value is not None and not isinstance(value, dict):
            return "an object"
        return ""


@dataclass(frozen=True, slots=True)
class Library:
    """The installed mlx-lm.

    Attributes:
        folder: of its models.
        version: of the package.
        renamed: names of modules by the model_types that go by another.
    """

    folder: Path
    version: str
    renamed: dict[str, str]

    def arguments(self, model_type: str) -> dict[str, Argument]:
        """What the model of that type, which it knows, reads of a config, by name.

        Empty where it reads configs in a way of its own.
        """
        name = self.renamed.get(model_type, model_type)
        tree = ast.parse((self.folder / f"{name}.py").read_text(encoding="utf-8"))
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelArgs")
        body = next((node.body for node in classes), [])
        if any(isinstance(node, ast.FunctionDef) and node.name == "from_dict" for node in body):
            return {}
        return {
            node.target.id: Argument(ast.unparse(node.annotation), is_required=node.value is None)
            for node in body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def knows(self, model_type: str) -> bool:
        """Whether it has a model of that type."""
        name = self.renamed.get(model_type, model_type)
        path = self.folder / f"{name}.py"
        if not _NAME.fullmatch(name) or not path.is_file():
            return False
        text = path.read_text(encoding="utf-8")
        return all(each.search(text) for each in _CLASSES)


@cache
def library() -> Library | None:
    """That of this environment; None: it is not installed."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
        version = importlib.metadata.version(PACKAGE.replace("_", "-"))
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        return None
    root = Path(places[0])
    return Library(root / "models", version, _renamed(root / "utils.py"))


def check_known(folder: ModelFolder) -> None:
    """Raise UnsupportedError for a folder that mlx-lm, where it is installed, has no model for."""
    if folder.config.get("model_file") is not None:
        text = f"{folder.path}: its config asks for a program of its own (model_file), which is not run"
        raise UnsupportedError(text, architecture=folder.architecture, path=str(folder.path))
    found = library()
    name = text_type(folder.config) if folder.architecture in FAMILIES else folder.architecture
    if found is not None and not found.knows(name):
        text = f"{folder.path}: mlx-lm {found.version} knows no architecture {name!r}"
        raise UnsupportedError(text, architecture=folder.architecture, path=str(folder.path))
    if found is not None and folder.settings.text is folder.settings.document:
        _check_arguments(folder, found)


def _check_arguments(folder: ModelFolder, found: Library) -> None:
    """Raise ModelFileError for values that its class of mlx-lm's could not be made of."""
    config = folder.settings
    for name, argument in found.arguments(folder.architecture).items():
        if name not in config.document:
            if argument.is_required:
                raise config.broken(f"{name} is missing, which mlx-lm {found.version} needs of this model")
            continue
        value = config.document[name]
        wanted = "" if name.endswith(_TOKENS) else argument.why_not(value)
        if name == _ROPE_BASE and value is None:
            wanted = "a number"
        if name.endswith(_EPSILONS) and isinstance(value, int | float) and value < 0:
            wanted = "a number above 0"
        if wanted:
            raise config.broken(f"{name} is {str(value)[:_MAX_SHOWN]!r}, {wanted} is needed")


def _renamed(path: Path) -> dict[str, str]:
    """The table of a source file, read without running it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == _REMAPPING for target in node.targets
        ):
            found = ast.literal_eval(node.value)
            return {str(name): str(module) for name, module in found.items()}
    return {}
