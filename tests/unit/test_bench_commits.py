"""Two commits of Stoker in turns: the base's worktree, which source runs, and the report."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import __main__ as command
from bench import company, contest, session
from bench.commits import Commits, StokerAt, checked_out
from bench.errors import BenchError
from bench.peers import Shape
from bench.session import Plan
from bench.target import Target
from bench.workloads import WORKLOADS
from bench_stand_in import StandIn, StandInProcess, serving

SHAPE = Shape(num_slots=8, ctx_size=4096, num_threads=2)


def git(repository: Path, *arguments: str) -> str:
    """What git says, with an author of its own and nobody's settings."""
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    answer = subprocess.run(
        ["git", "-C", str(repository), *who, *arguments],  # noqa: S607 - whichever git is here
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of a package that is called as ours is."""
    folder = tmp_path / "repository"
    source = folder / "src" / "stoker" / "__init__.py"
    source.parent.mkdir(parents=True)
    git(folder, "init")
    (folder / ".gitignore").write_text("__pycache__/\n")
    for number in ("1", "2"):
        source.write_text(f"NUMBER = {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-m", f"number [{number}]")
    return folder


def test_the_base_is_checked_out_beside_and_gone_at_the_end(repository: Path) -> None:
    """O7: the tree in use keeps its files and its commit; git knows of one worktree afterwards."""
    head = git(repository, "rev-parse", "HEAD")
    with checked_out("HEAD~1", repository) as tree:
        assert (tree / "src/stoker/__init__.py").read_text() == "NUMBER = 1\n"
        assert not tree.is_relative_to(repository)
    assert not tree.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain")) == (head, "")


@pytest.mark.parametrize("end", [KeyboardInterrupt, BenchError])
def test_an_end_before_its_time_removes_the_base_too(repository: Path, end: type[BaseException]) -> None:
    """O7: Ctrl-C and an error alike, with files that a run has left in it."""
    trees: list[Path] = []

    def measure() -> None:
        with checked_out("HEAD~1", repository) as tree:
            trees.append(tree)
            (tree / "left").write_text("something")
            raise end

    with pytest.raises(end):
        measure()
    assert not trees[0].exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("commit", ["nosuch", "--all", "HEAD:src"])
def test_what_is_no_commit_is_refused_in_gits_words(repository: Path, commit: str) -> None:
    """O7: and nothing is left."""
    with pytest.raises(BenchError, match=r"fatal|error"), checked_out(commit, repository):
        pytest.fail("nothing is checked out")
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_the_report_names_the_commits_that_python_really_takes(repository: Path) -> None:
    """O7: an installed package must not answer for the commit."""
    with checked_out("HEAD~1", repository) as tree:
        (repository / "src/stoker/__init__.py").write_text("NUMBER = 3\n")
        described = Commits(Path("m.gguf"), repository, tree, SHAPE).describe()
        new, base = (git(repository, "rev-parse", "--short", name) for name in ("HEAD", "HEAD~1"))
        assert described == {"new": f"{new} with changes: number [2]", "base": f"{base}: number [1]"}
        shutil.rmtree(tree / "src/stoker")
        with pytest.raises(BenchError, match=r"Python takes stoker from .*, not from"):
            Commits(Path("m.gguf"), repository, tree, SHAPE).describe()


def test_both_commits_are_told_the_same_but_for_their_source(tmp_path: Path) -> None:
    """O7: one environment, one shape, one model; folders of their own."""
    new, base = Commits(Path("m.gguf"), tmp_path / "n", tmp_path / "b", SHAPE).servers(tmp_path / "kept")
    commands = [server.command(SHAPE, 0) for server in (new, base)]
    differing = [pair for pair in zip(*commands, strict=True) if pair[0] != pair[1]]
    assert differing == [
        (f"PYTHONPATH={tmp_path}/n/src", f"PYTHONPATH={tmp_path}/b/src"),
        (f"{tmp_path}/kept/new", f"{tmp_path}/kept/base"),
        (f"{tmp_path}/kept/new/run", f"{tmp_path}/kept/base/run"),
    ]


async def test_two_commits_take_turns_on_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    """O7: each with its own server; nothing has a bar, and what is of no server is named and left out."""
    stand_ins = {"new": StandIn(), "base": StandIn()}
    urls: dict[str, str] = {}

    class Started(StandInProcess):
        def __init__(self, server: StokerAt, *_: object) -> None:
            super().__init__(urls[server.label])

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr(session, "ServerProcess", Started)
    monkeypatch.setattr(contest, "SETTLE_S", 0)
    monkeypatch.setattr(company, "WATCHED_S", 0.01)

    async def held(target: Target, _pid: int, _seed: int) -> dict[str, float]:
        return dict.fromkeys(("single", "fanout"), 900.0 if target.label == "new" else 500.0)

    monkeypatch.setattr(session, "held_after_work", held)
    plan = Plan((WORKLOADS["single"](),), frozenset({"masks", "memory"}), range(4, 6), has_swap=True)
    console = Console(record=True, file=io.StringIO())
    async with serving(stand_ins["new"]) as one, serving(stand_ins["base"]) as two:
        urls |= {"new": one, "base": two}
        with checked_out("HEAD~1", repository) as tree:
            commits = Commits(Path("m.gguf"), repository, tree, SHAPE)
            report = await session.compare_commits(plan, commits, console)
    assert report.labels == ("new", "base")
    assert {"new", "base", "load before"} <= set(report.machine)
    sent, again = ([body["prompt"] for body in stand_in.bodies[1:]] for stand_in in stand_ins.values())
    assert sent == again
    assert len(sent) == 2
    (single,) = report.comparisons
    assert all(series.is_good is None and len(series.ratios) == 2 for series in single.series)
    assert [len(pair) for pair in single.turns] == [2, 2]
    memory = {figure.key: (figure.value, figure.is_good) for figure in report.figures}
    assert memory["memory_single_more"] == (400.0, None)
    assert "masks, swap: left out" in console.export_text()


def test_the_command_checks_the_base_out_and_says_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """O7: a commit that is none ends with a message and status 1, before anything is measured."""
    monkeypatch.setattr(command, "compare_commits", lambda *_: pytest.fail("nothing to compare"))
    assert command.main(["--base", "no-such-commit", "--only", "single"]) == 1
    assert "no-such-commit" in capsys.readouterr().out


def test_ctrl_c_ends_the_command_with_a_line_and_no_worktree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    """O7: no traceback, status 1."""
    trees: list[Path] = []

    async def interrupted(_plan: object, commits: Commits, _console: object) -> None:
        trees.append(commits.base)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compare_commits", interrupted)
    monkeypatch.setattr(command, "checked_out", lambda commit: checked_out(commit, repository))
    assert command.main(["--base", "HEAD~1", "--only", "single"]) == 1
    assert "ended before its time" in capsys.readouterr().out
    assert trees
    assert not trees[0].exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_base_goes_with_no_other_server(capsys: pytest.CaptureFixture[str]) -> None:
    """O7: and its report lies apart from that of llama-server."""
    for other in (["--llama-server", "x"], ["--url", "u", "--url", "v", "--label", "a", "--label", "b"]):
        with pytest.raises(SystemExit):
            command.parse_arguments(["--base", "HEAD", *other])
        assert "compares Stoker with itself" in capsys.readouterr().err
    against, itself = (command.parse_arguments(given) for given in ([], ["--base", "HEAD"]))
    assert against.out != itself.out
