"""Every block and every command of the README and of docs/ does what its page says."""

from __future__ import annotations

import re
from pathlib import Path

import options
import pytest
from blocks import INDENTED, NEEDS_WORDS, ROOT, Block, blocks_of, pages, spans_of
from running import Place, WrongPageError, check_syntax, compare

WITHOUT_SLOW = [page for page in pages() if blocks_of(page)]
SLOW = [page for page in WITHOUT_SLOW if any(block.mark == "slow" for block in blocks_of(page))]


def name_of(page: Path) -> str:
    """How a test's id names it."""
    return str(page.relative_to(ROOT))


@pytest.mark.long
@pytest.mark.parametrize("page", WITHOUT_SLOW, ids=name_of)
def test_the_blocks_of_a_page_run_in_order(page: Path, place: Place) -> None:
    """What a reader copies works, and what the page says it prints is what it prints."""
    is_left_out = False
    for block in blocks_of(page):
        is_left_out = block.mark == "slow" or (is_left_out and block.mark == "output")
        if is_left_out:
            check_syntax(block)
        else:
            done(block, place)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_the_slow_blocks_of_a_page_run_too(page: Path, place: Place) -> None:
    """Those that take more than some seconds, with all that stands before them."""
    for block in blocks_of(page):
        done(block, place)


def done(block: Block, place: Place) -> None:
    """Do it; a failure names the place in the page."""
    try:
        place.do(block)
    except Exception as error:
        error.add_note(f"at {block}")
        raise


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_the_marks_of_a_page_say_why(page: Path) -> None:
    """A block that is not run has a reason next to it, and a misspelt mark is no comment that nobody sees."""
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    assert text.count("\n```") + text.startswith("```") == 2 * len(blocks), (
        "a fence is not closed or indented"
    )
    for block in blocks:
        assert bool(block.words) == (block.mark in NEEDS_WORDS), (
            f"{block}: the mark {block.mark!r} needs words, or none"
        )
    num_before_fences = len(re.findall(r"<!--[^\n]*-->\s*\n *```", text))
    assert num_before_fences == sum(bool(block.mark) for block in blocks), (
        "a comment above a fence is no mark"
    )


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_has_no_block_without_a_fence(page: Path) -> None:
    """What is only indented is collected by nobody."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert INDENTED.findall(text) == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_commands_in_running_text_exist(page: Path) -> None:
    """`stoker plan MODEL --limit 4GiB` between backticks names a command and options that there are."""
    found = [span for span in spans_of(page) if span.startswith("stoker ")]
    assert [(span, wrong) for span in found if (wrong := options.problem(span.split()[1:]))] == []


def test_make_targets_in_running_text_exist() -> None:
    """`make serve` between backticks is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        (page.name, span.split()[1])
        for page in pages()
        for span in spans_of(page)
        if re.match(r"make [a-z]", span)
    }
    assert named
    assert {(page, target) for page, target in named if target not in targets} == set()


def block_of(language: str, text: str, mark: str = "", words: str = "") -> Block:
    """A block of no page."""
    return Block("page.md", 1, language, text, mark, words)


@pytest.mark.parametrize("language", ["", "text", "rust", "perl"])
def test_a_block_that_nobody_would_run_is_refused(language: str, place: Place) -> None:
    """A new language or a screen without a mark fails until somebody says what it is."""
    with pytest.raises(WrongPageError, match="nobody runs this"):
        place.do(block_of(language, "a: b\n"))


def test_a_program_that_fails_fails_its_page(place: Place) -> None:
    """An error in Python or in a shell is an error of the page."""
    with pytest.raises(WrongPageError, match="ZeroDivisionError"):
        place.do(block_of("python", "1 / 0\n"))
    with pytest.raises(WrongPageError, match="exit 1"):
        place.do(block_of("sh", "false\necho never\n"))


def test_an_option_that_is_not_there_fails_its_page_without_being_run(place: Place) -> None:
    """Blocks that need a GPU or the hub are not run, but their commands are looked up."""
    unknown = block_of("sh", "stoker serve --slotz 4\n", "not run", "a test")
    with pytest.raises(WrongPageError, match="serve has no option --slotz"):
        place.do(unknown)
    with pytest.raises(WrongPageError, match="has no command severe"):
        place.do(block_of("ini", "[Service]\nExecStart=/usr/bin/stoker severe\n"))


def test_what_a_page_shows_is_compared_with_what_was_printed() -> None:
    """Words count; numbers, the width of columns and what `...` stands for do not."""
    compare("name   size\n...\nlast 4.2 MiB\n", "name size\nmodel  12 MiB\nother 3 MiB\nlast   17 MiB\n")
    compare("It took 3 s ...\n", "It took 12 s at 40 tokens a second\n")
    with pytest.raises(WrongPageError, match="the page shows"):
        compare("The capital is Paris.\n", "The capital is London.\n")


def test_a_shell_session_is_run_command_by_command(place: Place) -> None:
    """After each `$` stands a command, below it what it prints."""
    place.do(block_of("console", "$ echo one\none\n$ echo two; \\\n  echo three\ntwo\nthree\n"))
    with pytest.raises(WrongPageError, match="the page shows"):
        place.do(block_of("console", "$ echo one\ntwo\n"))
