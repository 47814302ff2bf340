"""What the page costs whoever runs it beside the model: tokens a second with it open, of those without.

Eight answers of equal length are streamed by a real model while Chromium, on the same cores, shows the page,
then once more while it does not; which comes first changes from round to round. Without `--model` the
embedded one answers. Needs Playwright (extra `dev`) and Chromium.

    python -m bench.page_open [--model FILE] [--rounds 6] [--tokens 256] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import httpx
import psutil

from bench.errors import BenchError
from bench.event_readers import NUM_STREAMS, WAIT_S, served, stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.async_api import Browser

SETTLE_S = 2.0
"""From the page's first drawing, or its end, to the measurement."""
_MILLISECONDS = 1000.0


@dataclass(frozen=True, slots=True)
class Round:
    """The same answers with the page and without.

    Attributes:
        ratio: tokens a second with the page open, of those without.
        browser_ms: CPU time of the browser in a second while it shows the page.
    """

    open_tokens_per_second: float
    closed_tokens_per_second: float
    ratio: float
    browser_ms: float


async def measure(model: str, rounds: int, tokens: int) -> list[Round]:
    """The rounds. Raises BenchError: no server, no Chromium."""
    from playwright.async_api import async_playwright  # noqa: PLC0415 - of the extra `dev`

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise BenchError("there is no Chromium: apt install chromium")
    options = ["--speculation", "off", "--ctx-size", "65536"]
    async with (
        served(model, *options) as url,
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
        async_playwright() as driver,
    ):
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        await _rate(http, tokens)  # the first answers are slower: prefixes are new, steps not yet known
        found = [await _round(browser, url, http, tokens, number) for number in range(rounds)]
        await browser.close()
    return found


async def _round(browser: Browser, url: str, http: httpx.AsyncClient, tokens: int, number: int) -> Round:
    before = await _rate(http, tokens) if number % 2 else None
    page = await browser.new_page(viewport={"width": 1280, "height": 860})
    await page.goto(f"{url}/ui")
    await page.wait_for_selector("text=In slots")
    opened, browser_ms = await _rate(http, tokens)
    await page.close()
    closed, _ = before or await _rate(http, tokens)
    return Round(opened, closed, opened / closed, browser_ms)


async def _rate(http: httpx.AsyncClient, tokens: int) -> tuple[float, float]:
    """Tokens a second of all streams, and the browser's CPU milliseconds in a second."""
    await asyncio.sleep(SETTLE_S)
    clock, counts = asyncio.get_running_loop().time, [0]
    begun_s, browser_ms = clock(), _browser_ms()
    await asyncio.gather(*(stream(http, counts, max_tokens=tokens) for _ in range(NUM_STREAMS)))
    took_s = clock() - begun_s
    return counts[0] / took_s, (_browser_ms() - browser_ms) / took_s


def _browser_ms() -> float:
    """CPU time of this program's browser so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name():
                times = process.cpu_times()
                total += float(times.user + times.system) * _MILLISECONDS
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_open", description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        rounds = asyncio.run(measure(given.model, given.rounds, given.tokens))
    except BenchError as error:
        print(f"page_open: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([asdict(each) for each in rounds]))
        return 0
    print("open tokens/s  closed tokens/s  ratio  browser ms/s")
    for each in rounds:
        print(
            f"{each.open_tokens_per_second:13.1f} {each.closed_tokens_per_second:16.1f}"
            f" {each.ratio:6.3f} {each.browser_ms:13.1f}"
        )
    ratios = sorted(each.ratio for each in rounds)
    print(f"median {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
