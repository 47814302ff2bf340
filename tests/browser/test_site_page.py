"""The page at a gate before two machines: how each is, and where requests went."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect
from test_control_room import OVERLAPS, PHONE, SLOW, bars, grave_faults, story

DRAWN = """async () => {
    for (let frame = 0; frame < 4; frame += 1) await new Promise(requestAnimationFrame);
}"""
"""The page has followed a change of its size."""


def machine_of(status, request_id):
    """The machine with the slot that a request has, by the last of its moves."""
    (row,) = [one for one in status["requests"] if one["request_id"] == request_id]
    slot = next(move["slot"] for move in reversed(row["moves"]) if move["slot"] is not None)
    ranges = [(one, *one["slots"]["one"]) for one in status["machines"]]
    return next(one for one, first, num_slots in ranges if first <= slot < first + num_slots)


def bar_at(page, request_id, machine):
    """The bar of a request in a lane of that machine; lanes are in the order of the names."""
    return bars(page, request_id).and_(page.locator(f"[aria-label*='{machine}']"))


@pytest.mark.long
async def test_a_request_is_seen_to_go_on_at_another_machine(open_page, serve, gate_to):
    """U14: its machine is killed: down with the reason, the bar ends, one in the other's lane goes on."""
    fixed = ("-m", f"fake:id=one,{SLOW}", "--slots", "2")
    async with serve(*fixed) as one, serve(*fixed) as other, gate_to(one.url, other.url) as gate:
        page = await open_page(gate.url)
        rows = page.get_by_role("region", name="Machines").locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(page.get_by_role("region", name="Machines")).to_contain_text("2 of 2 machines up")
        request_id, done = await gate.begin(max_tokens=300)
        status = await gate.until(lambda status: status["requests"][0]["state"] == "decode")
        await expect(bars(page, request_id)).to_have_count(1)
        lost = machine_of(status, request_id)
        process = next(server.process for server in (one, other) if server.url == lost["url"])
        process.kill()
        await process.wait()
        left = next(each["name"] for each in status["machines"] if each != lost)
        await expect(bars(page, request_id)).to_have_count(2)
        there, here = bar_at(page, request_id, lost["name"]), bar_at(page, request_id, left)
        await expect(there).to_have_count(1)
        await expect(here).to_have_count(1)
        await expect(page.locator(".canvas .handover")).to_have_count(1)
        row = rows.filter(has_text=lost["name"])
        await expect(row).to_contain_text("down no server answers at")
        await expect(row.locator(".level.bad")).to_have_text("down")
        assert (await done).json()["usage"]["completion_tokens"] == 300
        await is_usable(page)
        await page.set_viewport_size({"width": 1280, "height": 800})
        await page.locator(".canvas .bar[tabindex='0']").focus()  # the last lane's
        await page.keyboard.press("ArrowUp")
        if lost["name"] > left:
            await expect(here).to_be_focused()
            await page.keyboard.press("ArrowDown")
        await expect(page.locator(".bar:focus")).to_have_attribute("aria-label", re.compile(lost["name"]))
        await page.keyboard.press("Enter")
        told = story(page, request_id)
        await expect(told).to_contain_text(f"the machine at {lost['url']} was lost")
        await expect(told).to_contain_text(re.compile(f"goes on in slot 0, .* at {left}"))


async def is_usable(page):
    """For everybody, and on a phone."""
    assert await grave_faults(page) == {}
    await page.get_by_role("button", name="Table").click()
    await expect(page.get_by_role("group", name="Slots as a table").locator("tbody tr")).to_have_count(2)
    assert await grave_faults(page) == {}
    await page.get_by_role("button", name="Lanes").click()
    await page.set_viewport_size(PHONE)
    await page.evaluate(DRAWN)
    assert await page.evaluate(OVERLAPS) == []


async def test_a_server_without_machines_loads_nothing_of_them(open_page, server):
    """U14: no table, and no module for one."""
    asked = []
    page = await open_page(server.url, "#/memory")
    page.on("request", lambda request: asked.append(request.url))
    await page.reload()
    await page.goto(f"{server.url}/ui#/now")
    await expect(page.get_by_role("region", name="Slots", exact=True)).to_be_visible()
    await expect(page.get_by_role("region", name="Machines")).to_have_count(0)
    assert [url for url in asked if url.endswith("/now.js")]
    assert not [url for url in asked if url.endswith("/machines.js")]
