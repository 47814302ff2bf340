"""Pictures in requests: parts of three APIs, what the model gets, what the answer says, what is refused."""

from __future__ import annotations

import base64
import gc
import random
from contextlib import aclosing
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from PIL import Image as Pillow
from stand_in import INFO, StandInRuntime
from starlette.requests import Request

from pictures import bomb, encoded, first_pixel, plain, uri
from stoker.images.intake import Intake
from stoker.images.limits import ImageLimits
from stoker.ipc.request import IMAGE_MARKER as HERE
from stoker.server.anthropic.messages import MessagesRequest
from stoker.server.openai.conversation import ConversationFields
from stoker.server.openai.responses.body import ResponsesRequest

SEEING = msgspec.structs.replace(INFO, has_vision=True)
NOISE = Pillow.effect_noise((90, 60), 60).convert("RGB")
RED, BLUE = plain(colour=(255, 0, 0)), plain(colour=(0, 0, 255))


class SeeingRuntime(StandInRuntime):
    """The same with a model that reads pictures, shrunk to 100 pixels, three of a request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.images = Intake(ImageLimits(edge_px=100, max_images=3))
        self.num_bodies: list[int] = []

    async def stream(self, request: Any, request_id: str | None = None, **how: Any) -> Any:
        """The same; notes how many bodies are held meanwhile."""
        gc.collect()
        self.num_bodies.append(len(bodies()))
        async with aclosing(super().stream(request, request_id, **how)) as events:
            async for event in events:
                yield event

    def resolve(self, model: str | None) -> Any:
        """The same model, seeing."""
        super().resolve(model)
        return SEEING


@pytest.fixture(scope="module")
def seeing(_module_servers):
    """A server whose model reads pictures."""
    server = _module_servers(SeeingRuntime)
    server.ready.result(60.0)
    return server


@pytest.fixture
def client(seeing):
    """The official client of it."""
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as found:
        yield found
    seeing.call(seeing.runtime.reset)


@pytest.fixture
def web(seeing):
    """A plain client of it."""
    with httpx.Client(base_url=seeing.url, timeout=60.0) as found:
        yield found
    seeing.call(seeing.runtime.reset)


def part(data: bytes, declared: str = "image/png") -> dict[str, Any]:
    """A picture as chat completions take it."""
    return {"type": "image_url", "image_url": {"url": uri(data, declared), "detail": "high"}}


def asked(*parts: Any) -> dict[str, Any]:
    """A body with one user turn."""
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2}


@pytest.mark.long
def test_pictures_reach_the_model_in_their_places(seeing, client):
    """SPEC V2: markers in the prompt, pictures beside it, in one order; a plain string is a URL too."""
    text = {"type": "text", "text": "then"}
    plain_string = {"type": "image_url", "image_url": uri(BLUE)}
    client.chat.completions.create(model="default", **asked(part(RED), text, plain_string))
    request = seeing.runtime.requests[-1]
    assert request.prompt == f"user: {HERE}then{HERE}"
    assert [first_pixel(picture) for picture in request.pictures] == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.long
def test_a_shrunk_picture_is_told_of(client):
    """SPEC V3: in the body's `images` and in a header; of a stream in the header and with its usage."""
    body = asked(part(plain(400, 200)), part(RED))
    raw = client.chat.completions.with_raw_response.create(model="default", **body)
    assert raw.headers["x-stoker-images"] == "400x200>100x50, 40x30"
    told = raw.http_response.json()["images"]
    assert told == [
        {"width": 400, "height": 200, "shrunk_to": [100, 50]},
        {"width": 40, "height": 30, "shrunk_to": None},
    ]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.chat.completions.with_raw_response.create(model="default", **body, **usage)
    assert stream.headers["x-stoker-images"] == "400x200>100x50, 40x30"
    assert [*stream.parse()][-1].images == told
    bare = client.chat.completions.with_raw_response.create(
        model="default", **asked("x" and {"type": "text", "text": "x"})
    )
    assert "x-stoker-images" not in bare.headers
    assert "images" not in bare.http_response.json()


@pytest.mark.long
def test_responses_take_pictures(seeing, client):
    """SPEC S1, V2: `input_image` parts."""
    parts = [
        {"type": "input_image", "image_url": uri(RED), "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    raw = client.responses.with_raw_response.create(
        model="default", input=[{"role": "user", "content": parts}]
    )
    request = seeing.runtime.requests[-1]
    assert (request.prompt, first_pixel(request.pictures[0])) == (f"user: {HERE}?", (255, 0, 0))
    assert raw.headers["x-stoker-images"] == "40x30"


@pytest.mark.long
def test_messages_take_pictures(seeing, web):
    """SPEC S1, V2: `image` blocks with base64 or a URL, in a user's turn and in a tool's result."""
    data = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    shown = {"type": "image", "source": {"type": "url", "url": uri(BLUE)}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [shown, {"type": "text", "text": "it"}]}
    turns = [
        {"role": "user", "content": [{"type": "image", "source": data}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = web.post("/v1/messages", json={"model": "default", "max_tokens": 2, "messages": turns})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-stoker-images"] == "40x30, 40x30"
    request = seeing.runtime.requests[-1]
    assert request.prompt.startswith(f"user: {HERE}?")
    assert f"{HERE}it" in request.prompt
    assert [first_pixel(picture) for picture in request.pictures] == [(255, 0, 0), (0, 0, 255)]


def test_a_template_is_applied_with_places_for_pictures(web):
    """SPEC S1: nothing is decoded for it."""
    answer = web.post("/apply-template", json=asked(part(b"rubbish"), {"type": "text", "text": "?"}))
    assert answer.json() == {"prompt": f"user: {HERE}?"}


def bodies() -> list[Any]:
    """Bodies of requests that are still in memory, and requests that keep their bytes."""
    found = [
        one
        for one in gc.get_objects()
        if isinstance(one, ConversationFields | MessagesRequest | ResponsesRequest)
    ]
    return found + [one for one in gc.get_objects() if isinstance(one, Request) and hasattr(one, "_body")]


@pytest.mark.long
def test_a_request_that_waits_holds_no_picture_but_the_one_the_model_gets(seeing, web):
    """SPEC V3: five hundred of them may wait; a photo as it came takes many times as much."""
    seeing.runtime.num_bodies.clear()
    block = {"type": "image", "source": {"type": "url", "url": uri(RED)}}
    shown = {"type": "input_image", "image_url": uri(RED)}
    for path, body in (
        ("/v1/chat/completions", asked(part(RED))),
        ("/v1/responses", {"input": [{"role": "user", "content": [shown]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}),
    ):
        assert web.post(path, json=body).status_code == 200, path
    assert seeing.runtime.num_bodies == [0, 0, 0]


def test_choices_are_not_scored_after_pictures(web):
    """SPEC I5: 400 that says so, and not that a picture is missing."""
    answer = web.post("/v1/choose", json={**asked(part(RED)), "choices": ["a", "b"]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", "messages.0.content.0.image_url")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (asked(part(RED), part(RED), part(RED), part(RED)), "invalid_request", "messages"),
        (asked({"type": "text", "text": HERE}), "invalid_request", "messages.0.content"),
        (asked(part(RED), {"type": "text", "text": HERE * 2}), "invalid_request", "messages.0.content"),
        (
            {"messages": [{"role": "system", "content": [part(RED)]}]},
            "invalid_request",
            "messages.0.content.0.image_url",
        ),
        (asked({"type": "image_url"}), "invalid_request", "messages.0.content.0.image_url"),
        (asked({"type": "image_url", "image_url": {}}), "invalid_request", "messages.0.content.0.image_url"),
        (asked({"type": "input_audio"}, part(RED)), "unsupported", "messages.0.content.0"),
    ],
)
def test_what_is_wrong_with_parts_is_refused_by_its_place(web, body, code, param):
    """SPEC V2, S3: 400."""
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


def test_a_model_without_vision_says_what_it_lacks(scripted_http):
    """SPEC V5: 400 that names the model, in all three APIs."""
    block = {"type": "image", "source": {"type": "url", "url": uri(RED)}}
    for path, body in (
        ("/v1/chat/completions", asked(part(RED))),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(RED)}]}]},
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}),
    ):
        answer = scripted_http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "stand-in takes text, no pictures: it has no vision" in answer.text, path
        assert '"unsupported"' in answer.text, path


def hostile(chance: random.Random, tmp_path: Any) -> list[str]:
    """Three hundred pictures that no model should see, as URLs."""
    kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    files = {kind: encoded(NOISE, kind) for kind in kinds}
    secret = tmp_path / "secret.png"
    secret.write_bytes(RED)
    link = tmp_path / "link.png"
    link.symlink_to(secret)
    found = [
        *(uri(bomb(30_000, 30_000)), uri(bomb(65_535, 65_535)), uri(bomb(9, 9)), uri(plain(1, 1)), uri(b"")),
        *(
            uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
            uri(b"%PDF-1.7", "application/pdf"),
        ),
        *(
            "http://127.0.0.1:1/a.png",
            "https://localhost/a.png",
            "http://169.254.169.254/latest",
            "ftp://a/b.png",
        ),
        *(
            f"file://{secret}",
            f"file://{link}",
            "file:///etc/passwd",
            str(secret),
            "data:image/png;base64,@@@@",
        ),
        *("data:image/png;base64", "data:", "", "x" * 10_000, uri(bomb(6000, 6000, b"x" * 100_000))),
    ]
    for kind, data in files.items():
        found += [uri(data + second) for second in (b"PK\x03\x04zip", b"<script>", b"%PDF-1.4", b"<?php ")]
        found.append(uri(data, "image/png" if kind != "PNG" else "image/gif"))
    while len(found) < 300:
        kind = chance.choice(kinds)
        found.append(uri(files[kind][: chance.randrange(len(files[kind]) - 4)], f"image/{kind.lower()}"))
    return found


def test_three_hundred_hostile_pictures_are_refused_and_leave_nothing_behind(web, tmp_path):
    """SPEC V2, S3, S5: each a typed 400 that names its place; the server's memory is as before."""
    urls = hostile(random.Random(3), tmp_path)
    before = psutil.Process().memory_info().rss
    for url in urls:
        body = asked({"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}})
        answer = web.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, url[:80]
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "messages.0.content.1.image_url"), url[
            :80
        ]
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
