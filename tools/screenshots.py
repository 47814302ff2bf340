"""Takes the pictures of docs/images from a recording: `python -m tools.screenshots` (make screenshots).

Needs Chromium and Playwright, as the tests of the page do. A picture is WebP, at most MAX_BYTES.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "tests/golden/events/busy.jsonl.gz"
IMAGES = ROOT / "docs/images"
MAX_BYTES = 150_000
QUALITIES = (90, 80, 70, 60, 50)
SCALE = 1.5
SETTLED_MS = 1500
BUSIEST = ".canvas button.bar.background:not(.open) >> nth=6"


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: of its file.
        tab: that is shown.
        theme: light or dark.
        size: of the window in CSS pixels.
        click: what is clicked first; empty: nothing.
    """

    name: str
    tab: str = "now"
    theme: str = "light"
    size: tuple[int, int] = (1280, 860)
    click: str = ""


PICTURES = (
    Picture("page-now"),
    Picture("page-story", theme="dark", click=BUSIEST),
    Picture("page-memory", tab="memory"),
    Picture("page-cache", tab="cache", theme="dark"),
    Picture("page-phone", size=(390, 844)),
)


@contextmanager
def shown(recording: Path) -> Iterator[str]:
    """The address of the page of a recording."""
    words = ("-m", "stoker.cli", "ui", "--no-browser", "--speed", "max", "--replay", str(recording))
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def taken(browser: Browser, url: str, picture: Picture) -> bytes:
    """The picture as PNG."""
    width, height = picture.size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        device_scale_factor=SCALE,
        color_scheme="dark" if picture.theme == "dark" else "light",
    )
    page.goto(f"{url}#/{picture.tab}")
    page.wait_for_timeout(SETTLED_MS)
    if picture.click:
        page.locator(picture.click).click()
        page.wait_for_timeout(SETTLED_MS)
    image = page.screenshot()
    page.close()
    return image


def compressed(png: bytes) -> bytes:
    """The same as WebP, as good as MAX_BYTES allow. Raises ValueError where no quality does."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for quality in QUALITIES:
        out = io.BytesIO()
        image.save(out, "WEBP", quality=quality, method=6)
        if out.tell() <= MAX_BYTES:
            return out.getvalue()
    raise ValueError(f"a picture is larger than {MAX_BYTES} bytes at quality {QUALITIES[-1]}")


def main() -> int:
    """Entry of `python -m tools.screenshots`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("there is no Chromium: apt install chromium")
        return 1
    IMAGES.mkdir(exist_ok=True)
    with shown(RECORDING) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture in PICTURES:
            data = compressed(taken(browser, url, picture))
            (IMAGES / f"{picture.name}.webp").write_bytes(data)
            print(f"{picture.name}: {len(data):,} bytes")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
