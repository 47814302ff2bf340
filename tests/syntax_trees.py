"""Syntax trees of source files.

The threads of a process share a counter of how deep `ast.parse` is (CPython 3.11): it fails with "AST
constructor recursion depth mismatch" where another one parses between two of its nodes, as one does that
prints a traceback. Only a collection of garbage, in which Hypothesis is called, lets another run there.
"""

from __future__ import annotations

import ast
import gc


def tree_of(text: str) -> ast.Module:
    """The tree of a source text, parsed without a collection of garbage on the way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
