"""The frame of the page in a browser: tabs, keys, colours, and a stream that ends and comes back."""

from __future__ import annotations

import re
import socket

import pytest
from playwright.async_api import expect

LIVE = re.compile("^live$")
OPTIONS = ("-m", "fake:")
STREAM = (
    ': a comment\n\nid: a-1\ndata: {"n": 1}\n\ndata: one\ndata: two\n\nevent: named\r\ndata: x\r\n\r\nid: 9'
)
PARSED = """async ([text, sizes]) => {
    const app = document.querySelector('script[type=module]').src;
    const { SseParser } = await import(app.replace('app.js', 'shell/sse.js'));
    return sizes.map((size) => {
        const parser = new SseParser();
        const events = [];
        for (let at = 0; at < text.length; at += size) events.push(...parser.push(text.slice(at, at + size)));
        return events;
    });
}"""


async def standing(page, text=LIVE):
    """Wait until the head of the page says how the stream is."""
    await expect(page.locator(".standing")).to_have_text(text)


async def test_the_page_follows_its_server_and_asks_nobody_else(open_page, server):
    """U2: and what is wrong is found by `open_page`: errors, violations, requests to elsewhere."""
    page = await open_page(server.url)
    await standing(page)
    assert await page.locator("main h1").count() == 1
    assert await page.title() != "Stoker"


@pytest.mark.long
async def test_keys_switch_tabs_and_colours_and_show_themselves(open_page, server):
    """U1: not while one writes; the colours stay over a reload."""
    page = await open_page(server.url, "#/chat")
    await page.wait_for_selector("#say")
    await page.fill("#say", "t?")
    await expect(page.locator("dialog")).to_have_count(0)
    await page.locator("main").focus()
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("dialog")).to_have_count(0)
    for wanted in ("light", "dark"):
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") == wanted
    await page.reload()
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the view"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"


@pytest.mark.long
async def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(open_page, serve, tmp_path):
    """U3: a wrong one is asked for again; it travels in a header, never in an address."""
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-user\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")
    async with serve(*OPTIONS, "--api-key-file", str(keys), "--admin-key-file", str(admins)) as server:
        page = await open_page(server.url, "#/chat")
        seen = []
        page.on("request", lambda request: seen.append((request.url, request.headers.get("authorization"))))
        for given in ("key-wrong", "key-user"):
            dialog = page.get_by_role("dialog", name="Key")
            await dialog.get_by_label("API key").fill(given)
            await dialog.get_by_role("button", name="Use this key").click()
        await standing(page)
        await expect(page.locator(".badge")).to_have_text("key may not administrate")
        assert {key for url, key in seen if "/v1/" in url} == {"Bearer key-wrong", "Bearer key-user"}
        assert not [url for url, _ in seen if "key-" in url]
        await page.reload()
        await standing(page)
        await page.get_by_role("button", name="Key: one is set").click()
        await page.get_by_role("button", name="Forget the key").click()
        await expect(page.locator(".standing")).to_have_text("no entry without a key")
        assert await page.evaluate("sessionStorage.getItem('stoker.key')") is None


@pytest.mark.long
async def test_a_stream_that_is_lost_comes_back_by_itself(open_page, serve):
    """U4: meanwhile the page says that it is lost, and how old what it shows is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    async with serve(*OPTIONS, "--port", port) as server:
        page = await open_page(server.url)
        await standing(page)
        heads = []
        page.on("request", lambda request: heads.append(request.headers))
    await standing(page, re.compile("(lost|connecting).*as of"))
    async with serve(*OPTIONS, "--port", port):
        await standing(page)
    assert all(head["last-event-id"] for head in heads if head["accept"] == "text/event-stream")
    assert heads


async def test_events_are_read_however_they_are_cut(open_page, server):
    """U4: comments are none, one that has not ended is not there yet."""
    page = await open_page(server.url)
    wanted = [
        {"event": "message", "id": "a-1", "data": '{"n": 1}'},
        {"event": "message", "id": None, "data": "one\ntwo"},
        {"event": "named", "id": None, "data": "x"},
    ]
    assert await page.evaluate(PARSED, [STREAM, [1, 2, 7, 1000]]) == [wanted] * 4
