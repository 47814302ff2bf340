"""A browser for the tests of the page, and servers for it; where there is no Chromium they are skipped.

Playwright's asynchronous API on one loop for the session: its other one leaves a loop running in the thread,
in which no other asynchronous test can run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

HERE = Path(__file__).parent
START_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_SANDBOX = ("--no-sandbox", "--disable-dev-shm-usage")  # tests may run as root, in a container
HEAP = ("--enable-precise-memory-info", "--js-flags=--expose-gc")


def pytest_collection_modifyitems(items):
    """All of these tests share the loop of the browser."""
    for item in items:
        if HERE in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    """Chromium of the system."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt install chromium")
    playwright = pytest.importorskip("playwright.async_api", reason="there is no Playwright")
    async with playwright.async_playwright() as driver:
        found = await driver.chromium.launch(executable_path=CHROMIUM, args=[*NO_SANDBOX, *HEAP])
        yield found
        await found.close()


@dataclass
class Watched:
    """What a page did that it must not do."""

    allowed: tuple[str, ...]
    faults: list[str] = field(default_factory=list)

    def watch(self, page) -> None:
        """Note errors, violations of the policy, and requests to another server than its own."""
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", lambda said: self._heard(said.text))
        page.on("request", lambda request: self._asked(request.url))

    def _heard(self, text: str) -> None:
        if "Content Security Policy" in text or "Trusted" in text:
            self.faults.append(f"policy: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((*self.allowed, "data:", "blob:")):
            self.faults.append(f"asked {url}")


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser):
    """Open the page of a server in a context of its own; it has done nothing that it must not do."""
    opened = []

    async def open_at(url, place="#/now", **context_settings):
        wanted = {"viewport": {"width": 1280, "height": 800}, **context_settings}
        context = await browser.new_context(**wanted)
        watched = Watched((f"{url}/",))
        opened.append((context, watched))
        page = await context.new_page()
        page.set_default_timeout(30_000)
        watched.watch(page)
        await page.goto(f"{url}/ui{place}")
        return page

    yield open_at
    for context, watched in opened:
        await context.close()
        assert watched.faults == []


def url_of(ready):
    """Where a server is, as it says itself."""
    return f"http://127.0.0.1:{ready['port']}"


class Server:
    """`stoker serve`, or `stoker ui --replay`, as a process of its own."""

    def __init__(self, process, url) -> None:
        self.process = process
        self.url = url
        self.http = httpx.AsyncClient(base_url=self.url, timeout=START_S)

    async def end(self) -> None:
        """SIGTERM, and wait."""
        await self.http.aclose()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            await self.process.wait()

    async def begin(self, **fields):
        """Have a text written: its id, and the task that ends with the answer."""
        before = {one["request_id"] for one in (await self.http.get("/v1/runtime")).json()["requests"]}
        task = asyncio.create_task(
            self.http.post("/v1/completions", json={"prompt": "It is said:", **fields})
        )

        def new(status):
            return {one["request_id"] for one in status["requests"]} - before

        status = await self.until(lambda status: task.done() or new(status))
        return (new(status) or {task.result().raise_for_status().json()["id"]}).pop(), task

    async def until(self, holds):
        """Ask for the status until something holds of it."""
        async with asyncio.timeout(START_S):
            while not holds(status := (await self.http.get("/v1/runtime")).json()):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
        return status


@asynccontextmanager
async def command(*arguments):
    """A stoker command that prints where it serves; ended at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stoker.cli", *arguments, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(START_S):
        line = (await process.stdout.readline()).decode().strip()
    assert line, f"stoker {arguments} did not start"
    server = Server(
        process, line.removesuffix("/ui") if line.startswith("http") else url_of(json.loads(line))
    )
    try:
        yield server
    finally:
        await server.end()


def serving(*arguments):
    """A server with these options besides."""
    fixed = ("--port", "0", "--no-follow-sleep", "--quiet", "--drain-s", "0")
    return command("serve", *fixed, *arguments)


@pytest.fixture(scope="session")
def replayed():
    """Show a recording."""
    return lambda file, speed="max": command("ui", "--no-browser", "--replay", str(file), "--speed", speed)


@pytest.fixture(scope="session")
def serve():
    """Start a server of one's own."""
    return serving


@pytest.fixture(scope="session")
def gate_to():
    """Start a gate before the servers at these URLs."""
    fixed = ("--port", "0", "--quiet", "--drain-s", "0")
    return lambda *urls: command("gate", *(word for url in urls for word in ("--peer", url)), *fixed)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(browser, tmp_path_factory):
    """One server for all tests that need no other: a model of the fake backend, quick."""
    folder = tmp_path_factory.mktemp("server")
    async with serving(
        "-m", "fake:eog_period=0", "--default-max-tokens", "64", "--states-dir", str(folder)
    ) as found:
        yield found
