"""Trained models that no package carries, where somebody has them.

`STOKER_TEST_MODELS` names a folder; tests that a tiny model of random weights cannot stand in for take their
files from there and say what is missing where it is not set. All others make the models they need.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "STOKER_TEST_MODELS"
FOLDER = Path(os.environ.get(VARIABLE) or "no-models").absolute()
READER, PROJECTOR = FOLDER / "report-reader-26m-q8_0.gguf", FOLDER / "report-reader-mmproj-q8_0.gguf"
REPORTS = FOLDER / "reports"
RERANKER = FOLDER / "reranker-bertmini-q8_0.gguf"

needs_reader = pytest.mark.skipif(
    not READER.is_file(), reason=f"{VARIABLE} names no folder with {READER.name}"
)
