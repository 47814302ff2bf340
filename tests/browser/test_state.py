"""What the page makes of events: its state, lanes and stories, as pure functions in a browser.

The recording is of `tools/record_events.py`. Views are mounted with a state of their own.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

BUSY = Path(__file__).parents[1] / "golden" / "events" / "busy.jsonl.gz"
MODULES = ("store", "lanes", "selectors", "story", "limits")
LOAD = """async (names) => {
    const app = document.querySelector('script[type=module]').src;
    const modules = names.map((name) => import(app.replace('app.js', `state/${name}.js`)));
    for (const module of await Promise.all(modules)) Object.assign(window, module);
    window.after = (documents, from) => reduceAll(from ?? initialState(), documents);
    window.barsOf = (found) => found.models.flatMap((model) => model.lanes.flatMap((lane) => lane.bars));
}"""
START = 1_000.0
ENDS = {"finished", "failed"}


@pytest.fixture(scope="module")
def busy():
    """The documents of the recording."""
    return [json.loads(line) for line in gzip.decompress(BUSY.read_bytes()).splitlines()]


@pytest_asyncio.fixture(loop_scope="session")
async def page(open_page, server):
    """A page whose state modules are global names."""
    found = await open_page(server.url)
    await found.wait_for_selector("main h1", state="attached")
    await found.evaluate(LOAD, list(MODULES))
    return found


def snapshot(at=START, **fields):
    """The state of an idle server with two slots."""
    slots = [{"slot": slot, "model": "chat"} for slot in (0, 1)]
    engine = {"state": "serving", "for_s": 1.0, "reason": "", "pid": 7, "restarts": 0}
    idle = {"requests": [], "recent": [], "groups": [], "models": [], "exits": [], "engine": engine}
    return {"event": "snapshot", "at": at, "id": "x", "schema": 2, **idle, "slots": slots, **fields}


def arrived(request_id, at, priority="interactive"):
    """The first event of a request."""
    fields = {"model": "chat", "priority": priority, "kind": "chat", "arrived_at": at, "prompt_tokens": 9}
    return {"event": "request", "at": at, "request_id": request_id, "what": "arrived", **fields}


def moved(request_id, at, state, *, what="queued", **fields):
    """A later one: fields of its move, and of the event."""
    slot, reason, by = fields.pop("slot", None), fields.pop("reason", ""), fields.pop("by", None)
    index = 0 if slot is not None or state == "parked" else None
    move = {"at": at, "state": state, "index": index, "slot": slot, "reason": reason, "by": by}
    return {"event": "request", "at": at, "request_id": request_id, "what": what, "move": move, **fields}


def handed_over():
    """A job gives its only slot to somebody, and goes on."""
    return [
        snapshot(),
        arrived("job", START + 1, "background"),
        moved("job", START + 1.1, "prefill", slot=0),
        moved("job", START + 2, "decode", slot=0),
        arrived("person", START + 5),
        moved("job", START + 5.1, "parked", reason="gave its slot to person (interactive)", by="person"),
        moved("person", START + 5.1, "prefill", slot=0),
        moved("person", START + 8, "ended", reason="stop", what="finished", finish_reason="stop"),
        moved("job", START + 8.1, "prefill", slot=0),
        moved("job", START + 8.2, "decode", slot=0),
        moved("job", START + 12, "ended", reason="length", what="finished", finish_reason="length"),
    ]


@pytest.mark.long
async def test_a_recording_is_told_as_it_was(page, busy):
    """U10: every request that ended is in the history, with its moves; nobody is left who is not there."""
    ends = [each for each in busy if each.get("what") in ENDS and not each.get("group")]
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const found = lanesOf(state, state.at);
            return {
                ended: state.ended.map((row) => row.request_id),
                stories: state.ended.every((row) => storyOf(row, state.at).at(-1).kind === 'ended'),
                restarts: state.engine.restarts, exits: state.exits.length, outages: found.outages.length,
                handovers: found.handovers.length, parked: state.ended.some((row) => row.num_parks > 0),
                replayed: barsOf(found).some((bar) => bar.segments.some((each) => each.kind === 'replayed')),
                tokens: state.coarse.reduce((sum, bucket) => sum + bucket.tokens, 0),
            };
        }""",
        busy,
    )
    assert found["ended"] == [each["request_id"] for each in ends]
    assert found["stories"]
    assert (found["restarts"], found["exits"], found["outages"]) == (1, 1, 1)
    assert found["handovers"] > 0
    assert found["parked"]
    assert found["replayed"]
    assert found["tokens"] == sum(each["tokens"] for each in busy if each["event"] == "steps")


@pytest.mark.long
async def test_slices_of_documents_give_the_state_that_single_ones_give(page, busy):
    """U10: and the state that was there before stays as it was."""
    assert await page.evaluate(
        """(documents) => {
            const told = (state) => JSON.stringify(state, (_, each) =>
                each instanceof Map ? [...each] : each);
            const half = after(documents.slice(0, 500));
            const before = told(half);
            const whole = told(after(documents.slice(500), half));
            const single = told(documents.reduce((state, one) => after([one], state), initialState()));
            return [whole === single, told(half) === before];
        }""",
        busy,
    ) == [True, True]


async def test_a_preemption_is_one_bar_that_gives_way_to_another_and_goes_on(page):
    """U11: the lane has three bars, the job waits beside them, and the story says for whom."""
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const found = lanesOf(state, state.at + 1);
            const story = storyOf(requestOf(state, 'job'), state.at);
            return { bars: barsOf(found).map((bar) => [bar.id, bar.from, bar.to]), handovers: found.handovers,
                     sidings: found.models[0].lanes[0].sidings.flat().map((wait) => wait.segments[0].kind),
                     story: story.map((each) => each.text),
                     parks: after(documents.slice(0, 6)).live.get('job').num_parks };
        }""",
        handed_over(),
    )
    assert found["bars"] == [
        ["job", START + 1.1, START + 5.1],
        ["person", START + 5.1, START + 8],
        ["job", START + 8.1, START + 12],
    ]
    (handover,) = found["handovers"]
    assert (handover["giver"]["id"], handover["taker"]["id"]) == ("job", "person")
    assert (handover["giver"]["slot"], handover["taker"]["slot"]) == (0, 0)
    assert "parked" in found["sidings"]
    assert found["parks"] == 1
    assert found["story"][-4:] == [
        "gave its slot to person (interactive)",
        "goes on in slot 0",
        "writes on in slot 0",
        "at its token limit",
    ]


async def test_what_an_engine_lost_is_read_again(page):
    """U11: after a restart, until the next token is written."""
    documents = [
        *handed_over()[:4],
        {"event": "engine", "at": START + 3, "state": "restarting", "reason": "ended with SIGKILL"},
        moved("job", START + 3, "held", reason="the engine is restarting", what="held"),
        {"event": "engine", "at": START + 4, "state": "serving", "reason": ""},
        moved("job", START + 4, "preparing", reason="goes on from 8 tokens", what="replayed"),
        moved("job", START + 4.5, "prefill", slot=1),
        moved("job", START + 5, "decode", slot=1),
    ]
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const found = lanesOf(state, state.at + 2);
            const kinds = barsOf(found).map((bar) => bar.segments.map((each) => each.kind));
            return [kinds, found.outages, state.live.get('job').num_restarts];
        }""",
        documents,
    )
    assert found[0] == [["prefill", "decode"], ["replayed", "decode"]]
    assert [(each["from"], each["to"]) for each in found[1]] == [(START + 3, START + 4)]
    assert found[2] == 1


async def test_an_engine_that_wakes_up_has_not_ended(page):
    """U11: it is no end that nobody asked for, and its reason is not told where it says nothing."""
    moves = [("suspended", "suspended"), ("restarting", "resumed"), ("serving", "pid 8")]
    documents = [
        {"event": "engine", "at": START + number, "state": state, "reason": reason}
        for number, (state, reason) in enumerate(moves, 1)
    ]
    found = await page.evaluate(
        """(documents) => {
            const { exits, engine, notices } = after(documents);
            return [exits.length, engine.restarts, notices.map((each) => each.text)];
        }""",
        [snapshot(), *documents],
    )
    told = ["engine suspended", "engine restarting: resumed", "engine serving"]
    assert found == [0, 0, told]


async def test_a_load_stands_in_the_line_and_in_no_slot(page):
    """U11: behind those who wait; it is no request of anybody."""
    load = {"event": "request", "at": START + 1, "request_id": "load:chat", "what": "arrived", "kind": "load"}
    fields = {"model": "chat", "priority": "interactive", "arrived_at": START + 1, "state": "loading"}
    documents = [snapshot(), load | fields, arrived("waits", START + 2), moved("waits", START + 2, "queued")]
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const ids = (rows) => rows.map((row) => row.request_id);
            return [ids(lineOf(state)), ids(runningOf(state))];
        }""",
        documents,
    )
    assert found == [["waits", "load:chat"], []]


async def test_a_snapshot_replaces_what_was_lost_and_keeps_the_history(page):
    """U10: events that came too fast are counted, requests that are not in it are gone."""
    row = {"request_id": "late", "model": "chat", "priority": "interactive", "arrived_at": START + 20}
    ended = row | {"state": "ended", "end_to_end_s": 1.0, "finish_reason": "stop"}
    documents = [
        *handed_over(),
        arrived("lost", START + 13),
        snapshot(
            START + 30, dropped=5, requests=[row | {"request_id": "live", "state": "decode"}], recent=[ended]
        ),
    ]
    assert await page.evaluate(
        """(documents) => {
            const state = after(documents);
            return [[...state.live.keys()], state.ended.map((row) => row.request_id), state.num_lost];
        }""",
        documents,
    ) == [["live"], ["person", "job", "late"], 5]


async def test_what_a_page_does_not_know_changes_nothing(page):
    """U10: unknown events, unknown fields, documents that are none."""
    strange = [{"event": "later", "at": START + 1}, {"event": "constructor", "at": START + 1}, {}, None]
    assert await page.evaluate(
        """([known, strange]) => {
            const state = after([...known, ...strange]);
            return [state.ended.length, state.live.size, 'novel' in state.ended[0], state.ended[0].state];
        }""",
        [[{**each, "novel": 1} for each in handed_over()], strange],
    ) == [2, 0, False, "ended"]


async def test_one_choice_that_ended_is_no_request_that_ended(page):
    """U11: the others are told of, each with its own bar."""
    documents = [snapshot(), arrived("two", START + 1)]
    for index in (0, 1):
        documents.append(moved("two", START + 2, "decode", slot=index))
        documents[-1]["move"]["index"] = index
    documents.append(moved("two", START + 4, "ended", reason="stop", what="choice_ended"))
    documents[-1]["move"]["index"] = 1
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            return [state.live.get('two').state, barsOf(lanesOf(state, state.at + 1)).map((bar) => bar.to)];
        }""",
        documents,
    )
    assert found == ["decode", [START + 5, START + 4]]


async def test_everything_that_is_kept_is_bounded(page):
    """U12: requests, moves, notices, figures over time; the oldest goes."""
    moves = [moved("long", START + number, "queued", reason=f"{number}") for number in range(200)]
    rungs = [{"event": "rung", "at": START, "rung": "lower_limits", "is_undone": False}] * 300
    found = await page.evaluate(
        """([first, moves, rungs]) => {
            let state = after([...first, ...moves, ...rungs]);
            const long = state.live.get('long');
            for (let part = 0; part < 45; part += 1) {
                const ends = [];
                for (let number = 0; number < 250; number += 1) {
                    const at = first[0].at + part * 250 + number;
                    const move = { at, state: 'ended', index: null, slot: null, reason: 'stop' };
                    ends.push({ event: 'request', at, request_id: `r${part}-${number}`,
                                what: 'finished', move, arrived_at: at - 1, moves: Array(64).fill(move) });
                    ends.push({ event: 'steps', at, model: `m${number % 80}`, num_steps: 1, tokens: 1 });
                }
                state = after(ends, state);
            }
            const kept = state.ended.reduce((sum, row) => sum + row.moves.length, 0);
            const { ended, notices } = state;
            return [long.moves.length, long.num_moves, notices.length, ended.length, state.num_ended,
                    kept <= MAX_WITH_MOVES * MAX_MOVES + MAX_ENDED * MAX_OLD_MOVES,
                    state.steps.size <= MAX_MODELS,
                    state.fine.length <= 303, state.coarse.length <= 363];
        }""",
        [[snapshot(), arrived("long", START)], moves, rungs],
    )
    assert found == [64, 200, 128, 10_000, 11_250, True, True, True, True]


async def test_work_without_a_slot_has_a_lane_of_its_own(page):
    """U11: several may be there at once, and none lies over a request that has the slot."""
    documents = handed_over()[:4]
    for number in range(3):
        documents.append(arrived(f"embed-{number}", START + 2 + number))
        documents.append(moved(f"embed-{number}", START + 2 + number, "prefill"))
    found = await page.evaluate(
        """(documents) => {
            const lanes = lanesOf(after(documents), 1010).models[0].lanes;
            return lanes.map((lane) => [String(lane.slot), lane.bars.map((bar) => [bar.id, bar.num])]);
        }""",
        documents,
    )
    assert found == [["0", [["job", 1]]], ["1", []], ["Infinity", [["embed-0", 3]]]]
    await page.evaluate(MOUNT, documents)
    await expect(page.locator(".lane-name")).to_have_text(["slot 0", "slot 1", "no slot"])


def machine(name, first, **fields):
    """A machine of a gate with two slots, as its event tells of it."""
    return {"name": name, "state": "up", "slots": {"chat": [first, 2]}, "models": ["chat"], **fields}


async def test_lanes_of_a_site_stand_under_their_machines(page):
    """U14: slots as each machine counts them; who goes to another machine is drawn as a hand-over."""
    lost = [machine("a", 0, state="down"), machine("b", 2)]
    documents = [
        snapshot(machines=[machine("a", 0), machine("b", 2)]),
        arrived("r", START + 1),
        moved("r", START + 1.1, "prefill", slot=1, reason="slot 1, 0 tokens reused, at a"),
        moved("r", START + 2, "decode", slot=1),
        moved("r", START + 5, "parked", reason="the machine at a was lost"),
        {"event": "machines", "at": START + 5.1, "id": "x", "machines": lost},
        moved("r", START + 5.5, "prefill", slot=2, reason="slot 0, 0 tokens reused, at b"),
        moved("r", START + 5.6, "decode", slot=2),
        arrived("waits", START + 6),
        moved("waits", START + 6.1, "queued", reason="no free slot"),
    ]
    found = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const { models, handovers } = lanesOf(state, state.at + 5);
            const barsIn = (lane) => [lane.number, lane.bars.length];
            const lanes = models.map((model) => [model.title, model.lanes.map(barsIn)]);
            const given = handovers.map((each) => [each.giver.slot, each.taker.slot]);
            const told = storyOf(state.live.get("r"), state.at).map((each) => each.text);
            return { lanes, given, lines: models.map((model) => model.line.rows.length), told };
        }""",
        documents,
    )
    in_a, in_b = [[0, 0], [1, 1]], [[0, 1], [1, 0]]
    assert found["lanes"] == [["a (down), chat", in_a], ["b, chat", in_b], ["chat", []]]
    assert found["given"] == [[1, 2]]
    assert found["lines"] == [0, 0, 1]
    assert found["told"][-2:] == ["goes on in slot 0, 0 tokens reused, at b", "writes on in slot 0"]
    gone = {"event": "machines", "at": START + 9, "id": "x", "machines": [machine("b", 2)]}
    titles = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            return lanesOf(state, state.at + 400).models.map((model) => [model.title, model.lanes.length]);
        }""",
        [*documents, gone],
    )
    assert titles == [["b, chat", 2], ["chat", 0]]


async def test_no_two_lines_of_the_ledger_have_one_name(page):
    """U10: models have a line `other`; what no line explains is another."""
    found = await page.evaluate("ledgerOf({ other: 22, weights: 90, disk: 7 }, 161)")
    assert [(each["name"], each["size"]) for each in found] == [
        ("weights", 90),
        ("other", 22),
        ("unaccounted", 49),
    ]


@pytest.mark.long
async def test_a_crowd_of_short_requests_is_drawn_as_a_few_bars(page):
    """U12: short ones are joined, however many there were, and none of them is forgotten."""
    documents = [snapshot()]
    for number in range(1500):
        at = START + number * 0.2
        documents.append(arrived(f"r{number}", at))
        documents.append(moved(f"r{number}", at, "decode", slot=number % 2))
        end = {"what": "finished", "finish_reason": "stop"}
        documents.append(moved(f"r{number}", at + 0.15, "ended", reason="stop", **end))
    bars, shown = await page.evaluate(
        """(documents) => {
            const state = after(documents);
            const bars = barsOf(lanesOf(state, state.at, { min_s: 0.01 }));
            return [bars.length, bars.reduce((sum, bar) => sum + bar.num, 0)];
        }""",
        documents,
    )
    assert bars <= 420
    assert shown == 1500


MOUNT = """async (documents) => {
    const app = document.querySelector('script[type=module]').src;
    const names = ['dom', 'views/now', 'views/request', 'shell/place'];
    const modules = names.map((name) => import(app.replace('app.js', `${name}.js`)));
    const [{ html, render }, { View }, { RequestDrawer }, { place }] = await Promise.all(modules);
    const box = document.body.appendChild(document.createElement('div'));
    document.getElementById('app').remove();
    const state = after(documents);
    const may = { administrate: window.is_operator, steer: window.is_operator };
    const props = { state, now: state.at + 1, may };
    const story = (id) => id && html`<${RequestDrawer} ...${props} requestId=${id} />`;
    const show = () => render(html`<${View} ...${props} />${story(place.value.request)}`, box);
    place.follow(show);
    show();
}"""


async def test_lanes_are_walked_by_arrow_keys_and_a_story_opens_and_closes(page):
    """U13: one bar is a stop of the tabulator; Enter opens, Escape closes and comes back to the bar."""
    await page.evaluate("window.is_operator = true")
    await page.evaluate(MOUNT, handed_over()[:-1])
    bars = page.locator(".bar[tabindex='0']")
    await bars.focus()
    for key, wanted in (("ArrowLeft", "person, interactive"), ("ArrowLeft", "job, background")):
        await page.keyboard.press(key)
        await expect(page.locator(".bar:focus")).to_have_attribute("aria-label", re.compile(f"^{wanted}"))
    await page.keyboard.press("Enter")
    drawer = page.get_by_role("dialog", name="Request job")
    await expect(drawer).to_contain_text("gave its slot to person (interactive)")
    async with page.expect_request("**/v1/runtime/requests/job/pause"):
        await drawer.get_by_role("button", name="Pause").click()
    await page.keyboard.press("Escape")
    await expect(drawer).to_have_count(0)
    await expect(page.locator(".bar:focus")).to_have_attribute("aria-label", re.compile("^job"))


async def test_many_bars_are_drawn_over_some_frames(page):
    """U12: in the end all of them."""
    documents = [snapshot()]
    for number in range(150):
        at = START + 2 * number
        documents += [arrived(f"r{number}", at), moved(f"r{number}", at, "decode", slot=number % 2)]
        end = {"what": "finished", "finish_reason": "stop"}
        documents.append(moved(f"r{number}", at + 1.9, "ended", reason="stop", **end))
    await page.evaluate(MOUNT, documents)
    await expect(page.locator(".canvas .bar")).to_have_count(150)


async def test_lanes_are_there_as_a_table(page):
    """U13: with request, class, time and what it did; who may not steer is offered no buttons."""
    await page.evaluate(MOUNT, handed_over()[:-1])
    await page.get_by_role("button", name="Table").click()
    table = page.get_by_role("group", name="Slots as a table")
    await expect(table.get_by_role("row")).to_have_count(4)
    await table.get_by_role("button", name="person").click()
    drawer = page.get_by_role("dialog", name="Request person")
    await expect(drawer).to_contain_text("came to its end")
    await expect(drawer.get_by_role("button", name="Cancel")).to_have_count(0)
