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
MAX_WORDS = 40
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


def test_an_id_stands_once() -> None:
    """Of two promises of one id a citation could mean either."""
    ids = re.findall(r"^- \*\*([A-Z]\d+)\*\* ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ids) == len(set(ids)), sorted({each for each in ids if ids.count(each) > 1})


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
    """Links lead somewhere, and so do paths of modules between backticks; in every page but old decisions."""
    present = (page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr")
    pages = [*ROOT.glob("*.md"), *present, *sorted((ROOT / "docs" / "adr").glob("*.md"))[-1:]]
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / path for path in re.findall(r"\]\(([^)#:]+\.md)", text)]
        named = re.findall(r"`([\w/]+/[\w/]+\.py)`", text)
        modules = [_named(path) for path in named]
        missing += [(page.name, str(path)) for path in (*links, *modules) if not path.exists()]
    assert missing == []


def _named(path: str) -> Path:
    """Modules are named from `src/stoker`, other files from the root."""
    inside = ROOT / "src" / "stoker" / path
    return inside if inside.exists() else ROOT / path


def test_the_glossary_is_short_and_of_words_in_use() -> None:
    """Forty words of ours at most, each once, in order, each of them in code."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z][a-z ]+?) \|", page, re.MULTILINE)[1:]
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")).lower()
    assert len(words) <= MAX_WORDS
    assert words == sorted(set(words))
    assert [word for word in words if word.replace(" ", "_") not in code and word not in code] == []
