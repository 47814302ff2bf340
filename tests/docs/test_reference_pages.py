"""Pages that follow from the code are what the code says now; `make reference` writes them."""

import pytest
from tools.reference_pages.__main__ import DOCS, PAGES
from tools.reference_pages.markdown import docstring_of, sentence, table


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says_now(name):
    """Settings, routes, metrics, errors and the library's names; `make reference` brings them up to date."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make reference`"


def test_a_docstring_becomes_paragraphs_and_lists():
    """Sections are lists of names; what goes on in the next line goes on; ids of promises are left out."""
    shown = docstring_of(
        None,
        """Do it (SPEC C4).

        Args:
            one: a number
                of bytes.
            two: another.

        Raises:
            StokerError: it cannot be done.
        """,
    )
    assert shown == (
        "Do it.\n\nArgs:\n\n- `one`: a number of bytes.\n- `two`: another.\n\n"
        "Raises:\n\n- `StokerError`: it cannot be done.\n"
    )
    assert sentence("One\n    line (SPEC C1, C2).\n\nMore.") == "One line."


def test_a_bar_in_a_cell_is_no_column():
    """`off|on` stays one cell."""
    assert table(("a",), [("off|on",)]).splitlines()[-1] == "| off\\|on |"
