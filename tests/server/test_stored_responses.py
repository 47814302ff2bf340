"""Stored responses: gone on from, read again, listed, forgotten, bounded, and their owner's alone."""

from __future__ import annotations

import json
import os
import stat

import httpx
import openai
import pytest

from stoker.server.openai.responses.body import ResponsesRequest
from stoker.server.openai.responses.items import sealed
from stoker.server.openai.responses.store import ResponseStore, StoreBounds, StoredResponse

RESPONSES = "/v1/responses"


@pytest.fixture
def client(_fake):
    """A client of a server with the fake backend."""
    with httpx.Client(base_url=_fake.url, timeout=60) as client:
        yield client


@pytest.fixture
def official(_fake):
    """The official client of the same server."""
    with openai.OpenAI(base_url=f"{_fake.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def made(client, **fields):
    """A response of a few tokens."""
    answer = client.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(client, **fields):
    """Tokens of a prompt."""
    return client.post(f"{RESPONSES}/input_tokens", json=fields).json()["input_tokens"]


def test_a_response_is_read_again_and_forgotten(official):
    """W4: by the official client, as it was; afterwards it is a typed 404."""
    first = official.responses.create(model="default", input="Hi", max_output_tokens=4, metadata={"a": "b"})
    assert first.store is True
    assert official.responses.retrieve(first.id) == first
    official.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        official.responses.retrieve(first.id)
    assert (caught.value.code, caught.value.param) == ("response_not_found", "response_id")
    with pytest.raises(openai.NotFoundError):
        official.responses.delete(first.id)


def test_a_turn_goes_on_where_the_last_one_ended(client):
    """W4: input and output of every turn before; instructions are not carried over; streamed ones too."""
    first = made(client, input="My name is Ada.", instructions="Be brief.")
    body = {"input": "And?", "max_output_tokens": 4, "previous_response_id": first["id"], "stream": True}
    frames = client.post(RESPONSES, json=body).text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    second = json.loads(frames[-2].split("data: ", 1)[1])["response"]
    assert second["previous_response_id"] == first["id"]
    text = first["output"][0]["content"][0]["text"]
    said = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]
    assert second["usage"]["input_tokens"] == counted(client, input=said)
    third = {"input": "So?", "previous_response_id": second["id"]}
    said += [
        {"role": "assistant", "content": second["output"][0]["content"][0]["text"]},
        {"role": "user", "content": "So?"},
    ]
    assert counted(client, **third) == counted(client, input=said)
    client.delete(f"{RESPONSES}/{first['id']}")
    assert counted(client, **third) == counted(client, input=said)


def test_what_is_not_stored_cannot_be_gone_on_from(client):
    """W4: with `store: false`, and where nothing of that id ever was."""
    for previous in (made(client, store=False)["id"], "resp_x", "../../etc/passwd", "\ud800"):
        body = json.dumps({"input": "x", "previous_response_id": previous}).encode()
        answer = client.post(RESPONSES, content=body)
        assert answer.status_code == 400
        if previous != "\ud800":
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_the_output_of_a_call_that_nobody_made_is_refused(client):
    """W4: whether or not a stored response is continued; its place is named."""
    output = {"type": "function_call_output", "call_id": "call_x", "output": "o"}
    for continued in ({}, {"previous_response_id": made(client)["id"]}):
        answer = client.post(RESPONSES, json={"input": [output], **continued})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input.0.call_id")
        assert "no tool call found for function call output with call_id 'call_x'" in error["message"]


def test_the_items_of_an_input_are_listed_in_pages(client):
    """W4: each with an id, a type, a status and parts; the newest first unless asked otherwise."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = ["Hi", "Ho", "He"]
    asked = [{"role": "user", "content": text} for text in items]
    asked += [call, {"type": "function_call_output", "call_id": "c", "output": "o"}]
    path = f"{RESPONSES}/{made(client, input=asked)['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    assert [item["type"] for item in listed["data"]] == [
        *(["message"] * 3),
        "function_call",
        "function_call_output",
    ]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Hi"}]
    assert {item["status"] for item in listed["data"]} == {"completed"}
    ids = [item["id"] for item in listed["data"]]
    assert len(set(ids)) == 5
    page = client.get(path, params={"limit": 2, "after": ids[3]}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    for wrong in ({"limit": 101}, {"limit": "x"}, {"limit": 0}, {"after": "x"}, {"order": "up"}):
        answer = client.get(path, params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_an_item_is_referred_to_by_its_id(client):
    """W4: without the response that it is of; its text counts as if it had been sent."""
    first = made(client)
    (item,) = first["output"]
    asked = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item["id"]}]
    whole = [asked[0], item, {"role": "user", "content": "x"}]
    assert counted(client, input=[*asked, whole[2]]) == counted(client, input=whole)
    assert counted(client, input=[*asked[:1], {"id": item["id"]}, whole[2]]) == counted(client, input=whole)


def test_a_conversation_is_compacted(official, client):
    """W5: its system texts and a summary; whoever sends them goes on; what another server made is refused."""
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "We launch on Tuesday."},
        {"role": "assistant", "content": "Understood."},
    ]
    compacted = official.responses.compact(model="default", input=said)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    items = client.post(f"{RESPONSES}/compact", json={"model": "default", "input": said}).json()["output"]
    assert made(client, input=[*items, {"role": "user", "content": "When?"}])["output"]
    more = counted(client, input=[items[1], {"role": "user", "content": "When?"}])
    assert more > counted(client, input="When?")
    answer = client.post(f"{RESPONSES}/compact", json={"input": said})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    first = made(client)
    asked = {"model": "default", "previous_response_id": first["id"]}
    assert client.post(f"{RESPONSES}/compact", json=asked).json()["output"][-1]["type"] == "compaction"


@pytest.mark.parametrize(("content", "thought"), [(sealed("I think."), "I think."), ("gAAAA", None)])
def test_reasoning_comes_back_sealed(content, thought):
    """W6: what clients pass back unread is read again; what another server sealed is passed over."""
    item = {"type": "reasoning", "summary": [], "encrypted_content": content}
    turn = [{"role": "user", "content": "x"}, item, {"role": "assistant", "content": "y"}]
    messages = ResponsesRequest(input=turn).to_chat().body["messages"]
    assert messages[1].get("reasoning_content") == thought


def test_stored_responses_are_their_keys_alone(start_server, tmp_path):
    """W4: as caches are; files are their owner's alone."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = start_server(api_key_file=keys, responses_dir=tmp_path / "kept")
    server.ready.result(60)

    def asked(key, method, path, **given):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, **given)

    own = asked("one", "POST", RESPONSES, json={"input": "Hi"}).json()["id"]
    assert asked("one", "GET", f"{RESPONSES}/{own}").status_code == 200
    assert asked("two", "GET", f"{RESPONSES}/{own}").status_code == 404
    assert asked("two", "DELETE", f"{RESPONSES}/{own}").status_code == 404
    body = {"input": "x", "previous_response_id": own}
    assert asked("two", "POST", RESPONSES, json=body).status_code == 400
    assert asked("one", "POST", RESPONSES, json=body).status_code == 200
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "kept").glob("[!.]*")}
    assert modes == {0o600}


def stored(number, text=""):
    """A response of that number."""
    return StoredResponse(response={"id": f"resp_{number}", "output": [], "text": text}, items=[])


def keep(store, one):
    """Store it for whoever comes without a key."""
    store.keep("", one.response, lambda: one.items)


async def test_the_store_is_bounded_in_number_bytes_and_age(tmp_path):
    """W4: the oldest go first; what is too old, damaged or foreign is not there."""
    now = [1000.0]
    store = ResponseStore(tmp_path, StoreBounds(3, 10_000, 60.0), clock=lambda: now[0])
    for number in range(5):
        keep(store, stored(number))
        assert await store.get("", f"resp_{number}") == stored(number)
        for age, file in enumerate(sorted(tmp_path.iterdir(), key=os.path.getmtime, reverse=True)):
            os.utime(file, (1000 - age, 1000 - age))
    assert [await store.get("", f"resp_{number}") is None for number in range(5)] == [
        True,
        True,
        *[False] * 3,
    ]
    keep(store, stored(5, "x" * 9_800))
    assert await store.get("", "resp_5") is not None
    assert len(list(tmp_path.iterdir())) < 3
    keep(store, stored(6, "x" * 20_000))
    assert await store.get("", "resp_6") is None
    (file,) = [file for file in tmp_path.iterdir() if file.stat().st_size > 9_000]
    file.write_bytes(file.read_bytes()[:-1])
    assert await store.get("", "resp_5") is None
    keep(store, stored(7))
    now[0] = 1e12
    assert await store.get("", "resp_7") is None
    store.close()
    assert not list(tmp_path.glob("*.tmp"))
