"""Folders with files of the names that pages use, programs in front of PATH, and one server for all pages."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blocks import ROOT
from running import Place
from serving import Server

from pictures import plain
from stoker.models.store import embedded_default
from tiny_adapters import write_adapter
from tiny_models import write_bert, write_llama, write_rwkv7
from tiny_projector import write_projector

HERE = Path(__file__).parent
RANKS = 4
"""llama.cpp's number of the pooling that ranks."""


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that pages name: the embedded model, tiny ones of every other kind, a picture, a text."""
    folder = tmp_path_factory.mktemp("stock")
    embedded = embedded_default()
    assert embedded, "the embedded model is not installed"
    for name in ("my.gguf", "small.gguf"):
        (folder / name).symlink_to(embedded)
    write_bert(folder / "encoder.gguf")
    write_bert(folder / "reranker.gguf", pooling=RANKS)
    write_rwkv7(folder / "rwkv.gguf")
    write_llama(folder / "base.gguf")
    write_llama(folder / "vision.gguf", context=4096)
    write_projector(folder / "projector.gguf")
    write_adapter(folder / "poet.gguf", seed=1)
    write_adapter(folder / "clerk.gguf", seed=2)
    (folder / "photo.png").write_bytes(plain())
    (folder / "notes.txt").write_text("The meeting is on Tuesday.\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def server_url(
    stock: Path, session_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], str]]:
    """The address of the server that pages reach at port 8686; it is started when it is first asked for."""
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(session_cache.parent),
        "XDG_STATE_HOME": str(tmp_path_factory.mktemp("served")),
    }
    models = [word for name in ("my", "encoder", "reranker") for word in ("-m", f"{name}.gguf")]
    with ExitStack() as stack:
        yield functools.cache(lambda: stack.enter_context(Server(*models, cwd=stock, env=env)).url)


@pytest.fixture
def place(tmp_path: Path, stock: Path, server_url: Callable[[], str]) -> Place:
    """Where the blocks of one page run."""
    folder = tmp_path / "page"
    folder.mkdir()
    for path in stock.iterdir():
        (folder / path.name).symlink_to(path)
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(HERE / "shims"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "REAL_PATH": os.environ["PATH"],
        "REPO": str(ROOT),
        "REPOSITORY": str(ROOT),
        "TESTS_DOCS": str(HERE),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "COLUMNS": "100",
    }
    env.pop("STOKER_URL", None)
    return Place(folder, env, server_url)
