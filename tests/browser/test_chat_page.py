"""The tab Chat: what is said and answered, stopped, written again, and shown without ever being markup."""

from __future__ import annotations

import base64
import json

import pytest
import pytest_asyncio
from playwright.async_api import expect
from test_control_room import grave_faults

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGP4z8CAB+GTG8HSALfKY52fTcuYAAAAAElFTkSuQmCC"
)
MARKDOWN = """# A heading

Some **bold**, *slanted*, ~~struck~~ and `code`; [a link](https://a.example/x), [none](javascript:alert(1)).
![a picture](https://elsewhere.example/pixel.png)

- one
  - deeper
- two

1. first
2. second

> said by *others*

| a | b |
|---|:-:|
| 1 | `2` |

```html
<script>alert(1)</script>
**no bold**
```

<img src=x onerror="document.title='broken'"> <b>no markup</b> &amp; end"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TOO_LONG = "word " * 60_000
TOOLS = [{"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talker(browser, serve, tmp_path_factory):
    """A server with models that answer word for word, one that never ends, and one that sees."""
    folder = tmp_path_factory.mktemp("talker")
    (folder / "said").write_text(MARKDOWN, encoding="utf-8")
    (folder / "thought").write_text("<think>Let me see.</think>It is four.", encoding="utf-8")
    (folder / "called").write_text(CALL + "\fIt rains.", encoding="utf-8")
    models = (
        f"fake:id=talker,script={folder / 'said'}",
        f"fake:id=thinker,script={folder / 'thought'}",
        f"fake:id=caller,script={folder / 'called'}",
        "fake:id=endless,eog_period=0,step_delay_s=0.005",
        "fake:id=seer,vision=2,eog_period=0",
    )
    async with serve(*(part for model in models for part in ("-m", model))) as found:
        yield found


@pytest.fixture
def chat(open_page, talker):
    """The tab, with a model chosen."""

    async def open_with(model):
        page = await open_page(talker.url, "#/chat")
        await page.get_by_label("Model").select_option(model)
        return page

    return open_with


async def say(page, text):
    """Say it with the keyboard."""
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def last(page):
    """The newest answer."""
    return page.locator(".message.assistant").last


@pytest.mark.long
async def test_an_answer_is_shown_in_markdown_that_is_never_markup(chat):
    """U5: and an image in it is a link, as the page asks no other server for anything."""
    page = await chat("talker")
    await say(page, "hello <b>there</b>")
    answer = last(page).locator(".markdown")
    await expect(answer).to_contain_text("&amp; end")
    assert await page.locator(".message.user .said").inner_text() == "hello <b>there</b>"
    assert await answer.get_by_role("heading", level=3).inner_text() == "A heading"
    for tag, texts in {
        "strong": ["bold"],
        "em": ["slanted", "others"],
        "del": ["struck"],
        "ul > li": ["one\ndeeper", "deeper", "two"],
        "ol > li": ["first", "second"],
        "blockquote": ["said by others"],
        "td": ["1", "2"],
        "pre": ["<script>alert(1)</script>\n**no bold**"],
    }.items():
        assert await answer.locator(tag).all_inner_texts() == texts, tag
    links = await answer.locator("a").evaluate_all("all => all.map((one) => [one.href, one.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["https://a.example/x", rel], ["https://elsewhere.example/pixel.png", rel]]
    assert await answer.locator("img, script, b").count() == 0
    assert await page.title() == "Chat · Stoker"


async def test_an_answer_is_stopped_written_again_and_taken_back(chat):
    """U5: what was written stands; the server's slot is free again."""
    page = await chat("endless")
    await say(page, "go on")
    await expect(last(page)).to_contain_text(" ", use_inner_text=True)
    await expect(last(page).locator(".markdown")).not_to_be_empty()
    await page.get_by_role("button", name="Stop").click()
    await expect(last(page)).to_contain_text("stopped")
    await page.get_by_role("button", name="Write it again").click()
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await page.get_by_role("button", name="Stop").click()
    assert await page.locator(".message").count() == 2
    await page.get_by_role("button", name="Change what I said").click()
    assert await page.get_by_label("Message", exact=True).input_value() == "go on"
    assert await page.locator(".message").count() == 0


async def test_the_class_and_the_options_go_with_the_request(chat, talker):
    """U5: so that a conversation can give way to others."""
    page = await chat("talker")
    await page.get_by_role("button", name="background").click()
    await page.get_by_text("System message, tools, sampling").click()
    await page.get_by_label("System message", exact=True).fill("Be brief.")
    await page.get_by_label("Tokens at most").fill("5")
    async with page.expect_request("**/v1/chat/completions") as asked:
        await say(page, "hi")
    body = (await asked.value).post_data_json
    assert (body["priority"], body["max_tokens"], body["model"]) == ("background", 5, "talker")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    await expect(last(page)).to_contain_text("cut at its longest")
    recent = (await talker.http.get("/v1/runtime")).json()["recent"]
    assert recent[-1]["priority"] == "background"
    await page.reload()
    await expect(page.locator(".message")).to_have_count(2)
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator(".message")).to_have_count(0)


async def test_thinking_is_folded(chat):
    """U5: it is there to be read, and no part of the answer."""
    page = await chat("thinker")
    await say(page, "2 + 2?")
    await expect(last(page)).to_contain_text("It is four.")
    thought = last(page).locator("details.thinking")
    await expect(thought.get_by_text("Let me see.")).to_be_hidden()
    await thought.locator("summary").click()
    await expect(thought.get_by_text("Let me see.")).to_be_visible()


@pytest.mark.long
async def test_calls_of_tools_are_shown_and_their_results_given(chat):
    """U5: the server runs nothing; whoever reads answers in the tool's place."""
    page = await chat("caller")
    await page.get_by_text("System message, tools, sampling").click()
    await page.get_by_label("Tools").fill("no json")
    await expect(page.get_by_text("no JSON:")).to_be_visible()
    await page.get_by_label("Tools").fill(json.dumps(TOOLS))
    await say(page, "weather?")
    call = last(page).locator(".call")
    await expect(call).to_contain_text("weather")
    await expect(call.locator("pre")).to_contain_text("}")  # arguments stream in
    assert json.loads(await call.locator("pre").inner_text()) == {"city": "Bern"}
    await call.get_by_label("Result").fill("rain")
    await last(page).get_by_role("button", name="Give the results").click()
    await expect(last(page)).to_contain_text("It rains.")
    assert "rain" in await page.locator(".message.tool").inner_text()


async def test_images_go_along_where_the_model_sees(chat):
    """U5: as many as four; one that is too much is refused by the page."""
    page = await chat("seer")
    await page.get_by_label("Tokens at most").evaluate("one => one.closest('details').open = true")
    await page.get_by_label("Tokens at most").fill("3")
    file = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}
    await page.get_by_label("Add images").set_input_files([file] * 5)
    await expect(page.locator(".toast")).to_contain_text("4 images at most")
    await page.get_by_label("Add images").set_input_files([file])
    await expect(page.locator(".images img")).to_have_count(1)
    async with page.expect_request("**/v1/chat/completions") as asked:
        await say(page, "what is it?")
    parts = (await asked.value).post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
    await expect(last(page)).to_contain_text("cut at its longest")
    await page.get_by_label("Model").select_option("talker")
    await expect(page.get_by_label("Add images")).to_have_count(0)


async def test_a_refusal_stands_in_the_answer_with_its_code(chat):
    """U5: as the server says it."""
    page = await chat("talker")
    await page.get_by_label("Tokens at most").evaluate("one => one.closest('details').open = true")
    await page.get_by_label("Tokens at most").fill("0")
    await say(page, "hi")
    await expect(last(page).get_by_role("alert")).to_contain_text("max_tokens")
    await expect(last(page).get_by_role("alert").locator("code")).to_have_text("invalid_request")


@pytest.mark.long
async def test_a_refused_turn_is_sent_no_more_and_its_text_is_there_to_be_shortened(chat):
    """U5: it stands where it was said, with why; what is said next gets its answer, also after a reload."""
    page = await chat("talker")
    await say(page, "first")
    await expect(last(page)).to_contain_text("tokens in")
    await say(page, TOO_LONG)
    alert = last(page).get_by_role("alert")
    await expect(alert.locator("code")).to_have_text("context_length_exceeded")
    await expect(alert).to_contain_text("left out of what follows")
    await expect(page.get_by_label("Message", exact=True)).to_have_value(TOO_LONG)
    await page.reload()
    await expect(page.locator(".message.user")).to_have_count(2)
    async with page.expect_request("**/v1/chat/completions") as asked:
        await say(page, "shorter")
    told = [(one["role"], one["content"]) for one in (await asked.value).post_data_json["messages"]]
    assert told == [("user", "first"), ("assistant", MARKDOWN), ("user", "shorter")]
    await expect(last(page)).to_contain_text("tokens in")


@pytest.mark.long
async def test_a_refused_turn_can_be_written_again(chat):
    """U5: once what stood against it is gone, it is part of the conversation as any other."""
    page = await chat("talker")
    await page.get_by_label("Tokens at most").evaluate("one => one.closest('details').open = true")
    await page.get_by_label("Tokens at most").fill("0")
    await say(page, "hi")
    await expect(last(page).get_by_role("alert")).to_contain_text("max_tokens")
    await page.get_by_label("Tokens at most").fill("")
    async with page.expect_request("**/v1/chat/completions") as asked:
        await page.get_by_role("button", name="Write it again").click()
    assert (await asked.value).post_data_json["messages"] == [{"role": "user", "content": "hi"}]
    await expect(last(page)).to_contain_text("tokens in")
    await expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.long
async def test_results_of_tools_that_are_refused_can_be_given_again(chat):
    """U5: what was written stays in its field, and the call keeps its form."""
    page = await chat("caller")
    await page.get_by_text("System message, tools, sampling").click()
    await page.get_by_label("Tools").fill(json.dumps(TOOLS))
    await say(page, "weather?")
    result = page.get_by_label("Result, as nothing is run here")
    give = page.get_by_role("button", name="Give the results")
    await result.fill(TOO_LONG)
    await give.click()
    await expect(last(page).get_by_role("alert").locator("code")).to_have_text("context_length_exceeded")
    await expect(result).to_have_value(TOO_LONG)
    await result.fill("rain")
    async with page.expect_request("**/v1/chat/completions") as asked:
        await give.click()
    told = (await asked.value).post_data_json["messages"]
    assert [one["role"] for one in told] == ["user", "assistant", "tool"]
    assert told[2]["content"] == "rain"
    await expect(last(page)).to_contain_text("It rains.")


@pytest.mark.long
async def test_a_conversation_can_be_used_by_everybody(chat):
    """U13: Markdown, thinking and calls of tools: nothing that axe calls serious, in either colours."""
    page = await chat("talker")
    await say(page, "hello")
    await expect(last(page)).to_contain_text("tokens in")
    await page.get_by_label("Model").select_option("thinker")
    await say(page, "think")
    await expect(last(page)).to_contain_text("tokens in")
    await last(page).locator("details.thinking summary").click()
    await page.get_by_label("Model").select_option("caller")
    await page.get_by_text("System message, tools, sampling").click()
    await page.get_by_label("Tools").fill(json.dumps(TOOLS))
    await say(page, "weather?")
    await expect(last(page).get_by_label("Result")).to_be_visible()
    assert await grave_faults(page) == {}


@pytest.mark.slow
async def test_a_real_model_is_talked_to(open_page, serve):
    """U5: a small one."""
    async with serve() as server:
        page = await open_page(server.url, "#/chat")
        await say(page, "What is the capital of France? Answer in one sentence.")
        await expect(last(page)).to_contain_text("tokens in", timeout=60_000)
        assert "Paris" in await last(page).locator(".markdown").inner_text()
        await last(page).get_by_role("button", name="Story").click()
        await expect(page.get_by_role("dialog", name="Request chatcmpl-")).to_contain_text("chat")
