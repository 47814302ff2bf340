"""The installed mlx-vlm, of which its models' modules are used and nothing else.

The package imports its whole program when it is imported itself: servers, trainers, OpenCV, data sets. The
modules of its models need none of that, so the package is entered past its own `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "mlx_vlm"
INSTALL = "pip install 'stoker[mlx-vlm]'"


@cache
def installed_version() -> str:
    """Of this environment's mlx-vlm, found by its files; empty: it is not installed."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
        return importlib.metadata.version(PACKAGE.replace("_", "-")) if spec else ""
    except (ImportError, ValueError):
        return ""


def model_module(name: str) -> ModuleType:
    """The module `name` of `mlx_vlm.models`, such as "llava.vision". Raises ImportError."""
    if PACKAGE not in sys.modules:
        _enter()
    return importlib.import_module(f"{PACKAGE}.models.{name}")


def _enter() -> None:
    """Put a package without contents of its own in the place of mlx-vlm's, with the same modules."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"mlx-vlm is not installed: {INSTALL}", name=PACKAGE)
    spec = ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations)
    module = ModuleType(PACKAGE, "The modules of mlx-vlm's models.")
    module.__path__, module.__spec__ = spec.submodule_search_locations, spec
    sys.modules[PACKAGE] = module
