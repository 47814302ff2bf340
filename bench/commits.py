"""Two commits of Stoker: the base checked out beside, and how the server of each is started.

Both run in this environment, with its Python, llama.cpp and libraries; only Stoker's own source differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.peers import StokerServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.peers import Server, Shape

ROOT = Path(__file__).resolve().parents[1]
NEW, BASE = "new", "base"
WHERE = "import stoker; print(stoker.__path__[0])"


@dataclass(frozen=True, slots=True)
class StokerAt:
    """`stoker serve` of this environment, with the source that lies in `tree`."""

    label: str
    tree: Path
    model: Path
    cache_dir: Path

    def command(self, shape: Shape, port: int) -> list[str]:
        """As `stoker serve` is told else, where Python finds that source first."""
        path = f"PYTHONPATH={self.tree / 'src'}"
        return ["env", path, *StokerServer(str(self.model), self.cache_dir).command(shape, port)]

    async def address(self, output: str, port: int) -> str | None:
        """From the readiness line."""
        return await StokerServer().address(output, port)


@dataclass(frozen=True, slots=True)
class Commits:
    """Two trees of Stoker's source to compare on `model`, a GGUF path: `new` is the first of the pair."""

    model: Path
    new: Path
    base: Path
    shape: Shape

    def servers(self, cache_dir: Path) -> tuple[Server, Server]:
        """The two, with folders of their own below `cache_dir`."""
        return (
            StokerAt(NEW, self.new, self.model, cache_dir / NEW),
            StokerAt(BASE, self.base, self.model, cache_dir / BASE),
        )

    def describe(self) -> dict[str, str]:
        """Which commits they are, as text by label.

        Raises:
            BenchError: one of them would not be what runs.
        """
        return {label: _described(tree) for label, tree in ((NEW, self.new), (BASE, self.base))}


@contextmanager
def checked_out(commit: str, repository: Path = ROOT) -> Iterator[Path]:
    """A folder with the files of `commit`, as a git worktree that is removed at the end.

    Raises:
        BenchError: there is no git, no repository or no such commit; the message carries what git says.
    """
    name = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="bench-base-") as folder:
        tree = Path(folder) / "tree"
        # no hook of the repository has anything to do with a benchmark
        _git(repository, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(tree), name)
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def _described(tree: Path) -> str:
    source = tree / "src"
    found = Path(_run(["env", f"PYTHONPATH={source}", sys.executable, "-P", "-c", WHERE]))
    if not found.is_relative_to(source):
        raise BenchError(f"Python takes stoker from {found}, not from {source}")
    changes = " with changes" if _git(tree, "status", "--porcelain", "--", "src") else ""
    name, _, title = _git(tree, "log", "-1", "--format=%h %s").partition(" ")
    return f"{name}{changes}: {title}"


def _git(repository: Path, *arguments: str) -> str:
    return _run(["git", "-C", str(repository), *arguments])


def _run(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise BenchError(f"{command[0]} is needed, and is not installed") from None
    except subprocess.CalledProcessError as error:
        raise BenchError(f"{' '.join(command)}:\n{error.stderr.strip()}") from None
    return answer.stdout.strip()
