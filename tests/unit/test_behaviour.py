"""Code and docs/behaviour.md: what is cited is promised there, and what is promised is cited."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "behaviour.md"
_IDS = r"[A-Z]\d{1,2}(?:(?:,? and |, | to |/)[A-Z]\d{1,2})*"
_MARKED = re.compile(rf"\bSPEC\s+({_IDS}|[A-Z])\b")
_HEAD = re.compile(rf"\s*({_IDS})[.:](?:\s|$)")
"""A test's docstring may begin with ids alone."""
_ELSEWHERE = re.compile(
    r"\bISSUE\b|\bIssue\b[,' ]|(?<!`)ARCHITECTURE\b|\bSTYLE \d|\bSPEC\b(?!\s+[A-Z]\d{0,2}\b)"
)
"""References to pages that this repository does not have."""


@cache
def promised() -> dict[str, str]:
    """Entries of the page by id."""
    text = PAGE.read_text(encoding="utf-8")
    return {
        found[1]: found[0]
        for found in re.finditer(r"^- \*\*([A-Z]\d+)\*\* .*\n(?:  .*\n)*", text, re.MULTILINE)
    }


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Every string and comment of src, tests, bench and tools that may cite, with where it stands."""
    return tuple(
        (f"{path.relative_to(ROOT)}:{token.start[0]}", token.string)
        for folder in ("src", "tests", "bench", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string)
    )


def citations() -> Iterator[tuple[str, str]]:
    """Where an id is cited, and the id; a letter alone is a section."""
    for place, text in texts():
        groups = [found[1] for found in _MARKED.finditer(text)]
        if (
            place.startswith("tests/")
            and text.startswith('"""')
            and (found := _HEAD.match(ast.literal_eval(text)))
        ):
            groups.append(found[1])
        for group in groups:
            for cited in re.findall(r"[A-Z]\d*", group):
                yield place, cited


def test_every_citation_resolves() -> None:
    """A reader who meets an id finds it on the page."""
    sections = set(re.findall(r"^## ([A-Z])  ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    known = sections | set(promised())
    assert [(place, cited) for place, cited in citations() if cited not in known] == []


def test_every_promise_is_cited_by_a_test() -> None:
    """What no test cites is no promise."""
    cited = {name for place, name in citations() if place.startswith("tests/")}
    assert sorted(set(promised()) - cited) == []


def test_the_tests_of_a_promise_are_there_and_cite_it() -> None:
    """Files move; the page moves with them."""
    by_file = {(place.rpartition(":")[0], name) for place, name in citations()}
    wrong = [
        (name, path)
        for name, entry in promised().items()
        for path in re.findall(r"`(tests/[^`]+)`", entry) or ["no test"]
        if (path, name) not in by_file
    ]
    assert wrong == []


def test_nothing_refers_to_pages_that_are_not_here() -> None:
    """Ids, plain words and files of this repository only."""
    found = [(place, match[0]) for place, text in texts() if (match := _ELSEWHERE.search(text))]
    assert found == []


def test_every_file_that_a_page_names_is_there() -> None:
    """Paths in docs/behaviour.md, docs/architecture.md and docs/glossary.md lead somewhere."""
    missing = [
        (page, path)
        for page in ("behaviour.md", "architecture.md", "glossary.md")
        for path in re.findall(r"\]\(([^)#]+\.md)", (ROOT / "docs" / page).read_text(encoding="utf-8"))
        if not (ROOT / "docs" / path).exists()
    ]
    assert missing == []
