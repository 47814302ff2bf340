"""Writes the pages of docs/ that follow from the code: `python -m tools.reference_pages` (make reference).

`--check` writes nothing and ends with 1 where a page is not what the code says; a test does the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.reference_pages.api import api_page
from tools.reference_pages.service import errors_page, metrics_page, routes_page
from tools.reference_pages.settings_page import settings_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "api.md": api_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "routes.md": routes_page,
    "settings.md": settings_page,
}


def main() -> int:
    """Entry of `python -m tools.reference_pages`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are not current")
    is_check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not is_check:
                path.write_text(text, encoding="utf-8")
    print(f"{'not current' if is_check else 'written'}: {', '.join(stale) or 'none'}")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
