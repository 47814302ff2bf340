"""The page at a server that works: what is seen of it, and what is done to it from there."""

from __future__ import annotations

import asyncio
import json
import signal
from itertools import chain

import psutil
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import expect
from simulated_events import SimulatedMachine
from test_state import BUSY

SLOW = "eog_period=0,step_delay_s=0.02"
TABS = ("now", "history", "memory", "cache", "machine", "chat")
GRAVE = {"serious", "critical"}
PHONE = {"width": 390, "height": 844}


CHANGES_OF_BARS = """() => {
    window.changed = [];
    new MutationObserver((all) => all.forEach((each) => window.changed.push(each.target.ariaLabel)))
        .observe(document.querySelector(".moving"), { subtree: true, attributeFilter: ["style"] });
}"""


def brief(request_id):
    """An id as bars show it."""
    return request_id.partition("-")[2][:6]


def bars(page, request_id):
    """The bars of a request."""
    return page.locator(f".canvas button.bar[aria-label^='{brief(request_id)},']")


def story(page, request_id):
    """The story of a request, over the tab."""
    return page.get_by_role("dialog", name=f"Request {request_id}")


@pytest.mark.long
async def test_a_job_gives_its_slot_to_somebody_and_goes_on(open_page, serve):
    """U11: in the only slot; both are seen while it happens, and the story tells it in words."""
    async with serve("-m", f"fake:id=one,{SLOW}", "--slots", "1") as server:
        page = await open_page(server.url)
        job, done = await server.begin(priority="background", max_tokens=80)
        await expect(bars(page, job)).to_have_count(1)
        await server.until(lambda status: status["requests"][0]["state"] == "decode")
        you, answered = await server.begin(max_tokens=40)
        await expect(bars(page, you)).to_have_count(1)
        answers = [answer.json() for answer in await asyncio.gather(done, answered)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [80, 40]
        await expect(bars(page, job)).to_have_count(2)
        await expect(page.locator(".canvas .handover")).to_have_count(1)
        await bars(page, job).first.click()
        told = story(page, job)
        await expect(told).to_contain_text(f"gave its slot to {brief(you)} (interactive)")
        await page.keyboard.press("Escape")
        await expect(told).to_have_count(0)


@pytest.mark.long
async def test_a_bar_that_is_over_moves_with_all_others_and_is_not_drawn_again(open_page, serve):
    """U12: time goes on by one step of what holds the bars; in the first window nothing has left it."""
    async with serve("-m", f"fake:id=one,{SLOW}", "--slots", "1") as server:
        page = await open_page(server.url)
        ended, text = await server.begin(max_tokens=2)
        await text
        going, running = await server.begin(max_tokens=200)
        bar, grows, moving = bars(page, ended), bars(page, going), page.locator(".canvas .moving")
        await expect(bar).to_have_count(1)
        await expect(grows).to_have_count(1)
        await page.evaluate(CHANGES_OF_BARS)
        label = await grows.get_attribute("aria-label")
        before = await moving.get_attribute("style")
        await expect(moving).not_to_have_attribute("style", before)
        await expect(grows).not_to_have_attribute("aria-label", label)
        changed = set(await page.evaluate("window.changed"))
        assert changed - {None}, "the one that runs grew"
        assert await bar.get_attribute("aria-label") not in changed
        await running


@pytest.mark.long
async def test_an_engine_that_is_killed_is_seen_to_come_back(open_page, serve):
    """U11: under two streams, which go on from what they had."""
    async with serve("-m", f"fake:id=one,{SLOW}", "--slots", "2") as server:
        page = await open_page(server.url)
        texts = [await server.begin(max_tokens=120) for _ in range(2)]
        status = await server.until(
            lambda status: [one["state"] for one in status["requests"]] == ["decode", "decode"]
        )
        for name, _ in texts:
            await expect(bars(page, name)).to_have_count(1)
        psutil.Process(status["engine"]["pid"]).send_signal(signal.SIGKILL)
        answers = [(await task).json() for _, task in texts]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [120, 120]
        await expect(page.locator(".outage")).to_have_count(1)
        for name, _ in texts:
            await expect(bars(page, name)).to_have_count(2)
        await bars(page, texts[0][0]).last.click()
        await expect(story(page, texts[0][0])).to_contain_text("restart")


@pytest.mark.long
async def test_requests_are_paused_resumed_and_cancelled_from_the_page(open_page, serve):
    """U3: as far as the key may; the server does it and the page shows that it did."""
    async with serve("-m", f"fake:id=one,{SLOW}") as server:
        page = await open_page(server.url)
        name, text = await server.begin(max_tokens=10_000)
        await bars(page, name).first.click()
        told = story(page, name)
        await told.get_by_role("button", name="Pause").click()
        await server.until(lambda status: status["requests"][0]["state"] == "paused")
        await expect(told.get_by_role("button", name="Resume")).to_be_focused()
        await page.keyboard.press("Enter")
        await server.until(lambda status: status["requests"][0]["state"] == "decode")
        await told.get_by_role("button", name="Cancel").click()
        await text
        await expect(told.get_by_role("button", name="Cancel")).to_have_count(0)
        status = await server.until(lambda status: not status["requests"])
        assert status["recent"][-1]["finish_reason"] == "cancelled"
        await page.keyboard.press("Escape")
        await expect(told).to_have_count(0)


@pytest.mark.long
async def test_a_text_is_asked_for_only_while_the_switch_of_the_page_is_on(open_page, serve):
    """U7: a running one grows; the switch holds for the tab, over another story and a reload."""
    async with serve("-m", f"fake:id=one,{SLOW}", "--request-texts") as server:
        page = await open_page(server.url)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        name, text = await server.begin(max_tokens=10_000)
        await bars(page, name).first.click()
        switch = story(page, name).get_by_role("switch", name="Show text")
        await expect(switch).not_to_be_checked()
        assert not [url for url in asked if url.endswith("/text")]
        await switch.check()
        await expect(story(page, name).get_by_label("Prompt", exact=True)).to_have_text("It is said:")
        answer = story(page, name).get_by_label("Answer", exact=True)
        early = await answer.inner_text()
        await expect(answer).not_to_have_text(early)
        await server.http.post(f"/v1/runtime/requests/{name}/cancel")
        whole = (await text).json()["choices"][0]["text"]
        await expect(answer).to_have_text(whole)
        await page.reload()
        await expect(story(page, name).get_by_label("Prompt", exact=True)).to_have_text("It is said:")
        await switch.uncheck()
        await expect(answer).to_have_count(0)
        assert await page.evaluate("sessionStorage.getItem('stoker.texts')") is None


@pytest.mark.long
async def test_a_server_that_shows_no_texts_offers_no_switch(open_page, serve):
    """U7: and says by which option it would."""
    async with serve("-m", "fake:id=one,eog_period=0") as server:
        page = await open_page(server.url)
        answer = await server.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
        await page.goto(f"{server.url}/ui#/now?request={answer.json()['id']}")
        told = story(page, answer.json()["id"])
        await expect(told).to_contain_text("--request-texts")
        await expect(told.get_by_role("switch")).to_have_count(0)


@pytest.mark.long
async def test_models_are_loaded_pinned_and_unloaded_from_the_page(open_page, serve):
    """U3: each by the route that programs use."""
    async with serve("-m", "fake:id=one", "-m", "fake:id=two") as server:
        page = await open_page(server.url, "#/memory")

        def state_of(name, wanted):
            return lambda status: (
                wanted in [model["state"] for model in status["models"] if model["id"] == name]
            )

        row = page.locator(".models tr", has_text="one")
        await row.get_by_role("button", name="Unload").click()
        await server.until(state_of("one", "absent"))
        await row.get_by_role("button", name="Load", exact=True).click()
        await server.until(state_of("one", "ready"))
        await row.get_by_role("button", name="Pin", exact=True).click()
        await server.until(lambda status: any(m["pinned"] for m in status["models"] if m["id"] == "one"))
        other = page.locator(".models tr", has_text="two")
        for is_pinned, offered in ((True, "Unpin"), (False, "Pin")):  # by somebody else
            body = {"model": "two", "pinned": is_pinned}
            (await server.http.post("/v1/runtime/models/pin", json=body)).raise_for_status()
            await expect(other.get_by_role("button", name=offered, exact=True)).to_have_count(1)


@pytest.mark.long
async def test_the_engine_is_suspended_and_woken_from_the_page(open_page, serve):
    """U3: asked once more; what runs then goes on where it was."""
    async with serve("-m", f"fake:id=one,{SLOW}") as server:
        page = await open_page(server.url, "#/machine")
        name, text = await server.begin(max_tokens=60)
        await server.until(lambda status: status["requests"][0]["state"] == "decode")
        await page.get_by_role("button", name="Suspend", exact=True).click()
        assert (await server.http.get("/v1/runtime")).json()["engine"]["state"] == "serving"
        await page.get_by_role("button", name="Suspend now").click()
        await server.until(lambda status: status["engine"]["state"] == "suspended")
        engine = page.get_by_role("region", name="Engine", exact=True)
        await expect(engine.locator(".level", has_text="suspended")).to_be_visible()
        await page.get_by_role("button", name="Wake up").click()
        await server.until(lambda status: status["engine"]["state"] == "serving")
        await expect(page.get_by_role("button", name="Suspend", exact=True)).to_be_enabled()
        assert (await text).json()["usage"]["completion_tokens"] == 60
        await page.goto(f"{server.url}/ui#/now?request={name}")
        await expect(story(page, name)).to_contain_text("suspended")


@pytest.mark.long
async def test_a_key_steers_its_own_requests_from_the_page(open_page, serve, tmp_path):
    """U3: as over the API; another key's are not there."""
    keys = tmp_path / "keys"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    async with serve("-m", f"fake:id=one,{SLOW}", "--api-key-file", str(keys)) as server:
        heads = [{"Authorization": f"Bearer {key}"} for key in ("key-one", "key-two")]
        body = {"prompt": "hi", "max_tokens": 10_000}
        tasks = [
            asyncio.create_task(server.http.post("/v1/completions", json=body, headers=head))
            for head in heads
        ]
        page = await open_page(server.url)
        dialog = page.get_by_role("dialog", name="Key")
        await dialog.get_by_label("API key").fill("key-one")
        await page.keyboard.press("Enter")
        mine = page.locator(".canvas button.bar:not(.cluster)")
        await expect(mine).to_have_count(1)
        await mine.click()
        await page.get_by_role("button", name="Cancel").click()
        assert (await tasks[0]).json()["choices"][0]["finish_reason"] == "cancelled"
        await expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        assert not tasks[1].done()


@pytest.mark.long
async def test_who_may_not_steer_is_offered_nothing(open_page, serve, tmp_path):
    """U3: the buttons are gone, and the API refuses the same."""
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-user\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")
    options = ("--api-key-file", str(keys), "--admin-key-file", str(admins))
    async with serve("-m", "fake:id=one", *options) as server:
        page = await open_page(server.url, "#/memory")
        heads = []
        page.on("request", lambda request: heads.append(request.headers))
        dialog = page.get_by_role("dialog", name="Key")
        await expect(dialog).to_contain_text("This server asks for a key.")
        for given, offered in (("key-user", 0), ("key-admin", 1)):
            await dialog.get_by_label("API key").fill(given)
            await dialog.get_by_role("button", name="Use this key").click()
            await expect(page.locator(".models")).to_contain_text("one")
            await expect(page.get_by_role("button", name="Unload")).to_have_count(offered)
            head = {"Authorization": f"Bearer {given}"}
            answer = await server.http.post("/v1/runtime/models/pin", json={"model": "one"}, headers=head)
            assert answer.status_code == (200 if offered else 403)
            await page.get_by_role("button", name="Key: one is set").click()
        assert heads
        assert not [head for head in heads if "last-event-id" in head]  # each key begins anew


# ---------------------------------------------------------------- a recording


async def grave_faults(page):
    """What axe calls serious, in both colours."""
    found = {}
    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme)
        told = await Axe().run(page)
        found[theme] = [one for one in told.response["violations"] if one["impact"] in GRAVE]
    return {theme: json.dumps(grave)[:1500] for theme, grave in found.items() if grave}


OVERLAPS = """() => {
    const kept = (one) => one.closest('.head, .composer, .drawer, .toasts'); // the rest scrolls below these
    const pressed = 'a[href]:not(.skip), button, input, select, textarea, summary, [tabindex="0"]';
    const seen = [...document.querySelectorAll(pressed)]
        .map((one) => ({ one, box: one.getBoundingClientRect() }))
        .filter(({ one, box }) => one.checkVisibility() && box.width > 2 && box.height > 2);
    const told = ({ one }) => one.ariaLabel ?? one.textContent.trim() ?? one.tagName;
    const is_out = ({ one, box }) => (box.left < -1 || box.right > innerWidth + 1) && !one.closest('.scroll');
    const found = seen.filter(is_out).map((each) => `${told(each)} is not within the page`);
    seen.forEach((here, number) => {
        for (const there of seen.slice(number + 1)) {
            if (here.one.contains(there.one) || there.one.contains(here.one)) continue;
            if (kept(here.one) !== kept(there.one)) continue;
            const [a, b] = [here.box, there.box];
            const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (across > 2 && down > 2) found.push(`${told(here)} and ${told(there)}`);
        }
    });
    const over = document.documentElement.scrollWidth - innerWidth;
    return over > 0 ? [...found, `${over} pixels sideways`] : found;
}"""


@pytest.mark.long
async def test_on_a_phone_nothing_that_is_pressed_lies_over_another(open_page, serve):
    """U13: in any tab of a server at work, with a story and a conversation; nothing scrolls sideways."""
    models = ("-m", f"fake:id=one,{SLOW}", "-m", "fake:id=a-model-of-a-long-name,eog_period=0")
    async with serve(*models, "--slots", "2", "--request-texts", "--default-max-tokens", "32") as server:
        page = await open_page(server.url, viewport=PHONE)
        jobs = [await server.begin(priority="background", max_tokens=4_000, model="one") for _ in range(3)]
        await server.begin(max_tokens=4_000, model="one")
        await server.http.post("/v1/completions", json={"prompt": "hi", "model": "one", "max_tokens": 4})
        for tab in TABS:
            await page.goto(f"{server.url}/ui#/{tab}")
            await expect(page.locator(f"main.{tab} > :nth-child(2)")).to_be_attached()
            if tab == "chat":
                await page.get_by_label("Model").select_option("a-model-of-a-long-name")
                await page.get_by_label("Message", exact=True).fill("hello")
                await page.keyboard.press("Enter")
                await expect(page.get_by_role("button", name="Story")).to_be_visible()
            assert await page.evaluate(OVERLAPS) == [], tab
        await page.goto(f"{server.url}/ui#/now?request={jobs[0][0]}")
        await story(page, jobs[0][0]).get_by_role("switch").check()
        await expect(story(page, jobs[0][0]).get_by_label("Prompt", exact=True)).to_be_visible()
        assert await page.evaluate(OVERLAPS) == []


@pytest.mark.long
async def test_how_a_request_ended_is_in_view_in_a_narrow_window(open_page, server):
    """U13: one that failed says so; the columns that have no room are reached by scrolling."""
    answer = await server.http.post("/v1/completions", json={"prompt": "hi " * 100_000, "max_tokens": 4})
    assert answer.is_client_error
    for width in (1000, 700):
        page = await open_page(server.url, "#/history", viewport={"width": width, "height": 700})
        ends = page.locator(".rows .level.bad")
        await expect(ends.first).to_contain_text("tokens")
        await expect(page.get_by_role("columnheader", name="End", exact=True)).to_be_in_viewport(ratio=1)
        assert await ends.first.evaluate("one => one.parentNode.getBoundingClientRect().right") <= width
        head = page.get_by_role("columnheader", name="Tokens/s")
        await head.scroll_into_view_if_needed()
        await expect(head).to_be_in_viewport(ratio=1)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.long
async def test_every_tab_can_be_used_by_everybody(open_page, replayed):
    """U13: nothing that axe calls serious, in either colours; nothing runs over the edge of a phone."""
    async with replayed(BUSY) as server:
        page = await open_page(server.url)
        await expect(page.locator(".canvas button.bar").first).to_be_attached()
        for tab in TABS:
            await page.goto(f"{server.url}/ui#/{tab}")
            await expect(page.locator(f"main.{tab} > :nth-child(2)")).to_be_attached()
            assert await grave_faults(page) == {}, tab
        await page.set_viewport_size(PHONE)
        for tab in TABS:
            await page.goto(f"{server.url}/ui#/{tab}")
            await expect(page.locator(f"main.{tab} > :nth-child(2)")).to_be_attached()
            assert await page.evaluate(OVERLAPS) == [], tab


@pytest.mark.long
async def test_a_recording_offers_nothing_to_steer(open_page, replayed):
    """U6: and says what it is."""
    async with replayed(BUSY) as server:
        page = await open_page(server.url, "#/memory")
        await expect(page.locator(".standing")).to_have_text("recording")
        await expect(page.locator(".models")).to_be_visible()
        for name in ("Unload", "Load", "Pin"):
            await expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
        await page.goto(f"{server.url}/ui#/machine")
        await expect(page.get_by_role("region", name="Engine", exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Suspend")).to_have_count(0)
        await page.goto(f"{server.url}/ui#/now")
        await page.locator(".canvas button.bar.open").first.click()
        await expect(page.locator(".drawer")).to_contain_text("Story")
        for name in ("Pause", "Resume", "Cancel"):
            await expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)


UNTIL = """async (wanted) => {
    const app = document.querySelector('script[type=module]').src;
    const { state } = await import(app.replace('app.js', 'shell/feed.js'));
    while (state.value.at < wanted) await new Promise((resume) => setTimeout(resume, 50));
}"""
SCROLL = """async (box) => {
    for (let top = 0; top < box.scrollHeight; top += box.scrollHeight / 60) {
        box.scrollTop = top;
        await new Promise(requestAnimationFrame);
    }
}"""
MAX_HEAP_BYTES = 80 * 2**20
MAX_TASK_MS = 50.0
NUM_TRIES = 2
TRACED = ["disabled-by-default-devtools.timeline", "toplevel"]
HOUR_S = 3600.0
NUM_ROWS = 10_000


def many_short(number):
    """Requests that end at once, behind the hour."""
    for place in range(number):
        at = 1_763_888_000.0 + HOUR_S + place / 1000
        told = {"event": "request", "at": at, "request_id": f"cmpl-{place:032x}", "id": f"s-{place}"}
        row = {"model": "chat", "priority": "background", "kind": "embed", "route": "library"}
        times = {"arrived_at": at, "queue_s": 0.001, "first_token_s": 0.004, "end_to_end_s": 0.005}
        move = {"at": at, "index": None, "slot": None, "reason": "", "by": None}
        yield told | row | times | {"what": "arrived", "state": "queued", "group": None, "moves": []}
        end = {"what": "finished", "state": "ended", "finish_reason": "stop", "prompt_tokens": 9}
        yield told | row | times | end | {"move": move | {"state": "ended", "reason": "stop"}, "group": None}


@pytest.mark.slow
async def test_an_hour_at_full_speed_leaves_the_page_quick_and_small(browser, open_page, replayed, tmp_path):
    """U12: no task of 50 ms from the first on, less than 80 MiB of heap, ten thousand rows that scroll.

    A task is as long as Chromium counts its thread's time: what other processes have of the cores is not the
    page's. They take the caches too, which is why it is tried once more.
    """
    file = tmp_path / "hour.jsonl"
    last_at = 0.0
    with file.open("w", encoding="utf-8") as out:
        for document in chain(SimulatedMachine().documents(HOUR_S), many_short(NUM_ROWS)):
            out.write(json.dumps(document) + "\n")
            last_at = max(last_at, document["at"])
    async with replayed(file) as server:
        for _ in range(NUM_TRIES):
            page = await open_page(server.url)
            heap_bytes, longest_ms = await watched_hour(browser, page, last_at)
            assert heap_bytes < MAX_HEAP_BYTES
            if longest_ms < MAX_TASK_MS:
                break
    assert longest_ms < MAX_TASK_MS


async def watched_hour(browser, page, last_at):
    """The heap after the hour, and the longest task from the page's start to scrolling and back."""
    await browser.start_tracing(page=page, categories=TRACED)
    await page.reload()
    await expect(page.locator(".canvas button.bar").first).to_be_attached()
    await page.evaluate(UNTIL, last_at)
    read_ms = longest_task_ms(await browser.stop_tracing())
    await page.evaluate("gc()")
    heap_bytes = await page.evaluate("performance.memory.usedJSHeapSize")
    await browser.start_tracing(page=page, categories=TRACED)
    await page.evaluate("location.hash = '#/history'")
    await expect(page.locator(".rows-box")).to_have_attribute("aria-rowcount", str(NUM_ROWS + 1))
    await page.locator(".rows-box .rows").evaluate(SCROLL)
    await page.evaluate("location.hash = '#/now'")
    await expect(page.locator(".canvas .links")).to_be_attached()
    return heap_bytes, max(read_ms, longest_task_ms(await browser.stop_tracing()))


def longest_task_ms(trace):
    """Time of the processor that the longest task of a page's main thread took."""
    events = json.loads(trace)["traceEvents"]
    names = [one for one in events if one["name"] == "thread_name"]
    main = {(one["pid"], one["tid"]) for one in names if one["args"]["name"] == "CrRendererMain"}
    tasks = [one for one in events if one["name"] == "RunTask" and (one["pid"], one["tid"]) in main]
    assert len(tasks) > 10
    return max(one.get("tdur", 0) for one in tasks) / 1000
