"""Folders that see, behind a real server: pictures in chats, cached, beside each other, refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image as Pillow

from model_folders import tiny_folder
from pictures import encoded, uri
from seeing_folders import EDGE, PATCH, seeing_folder
from stoker.runtime import Runtime

pytest.importorskip("mlx_lm", reason="MLX is not installed (the mlx extra)")
pytest.importorskip("stoker.backends.mlx.model")

from stoker.backends.mlx.vision.library import installed_version

if not installed_version():
    pytest.skip("mlx-vlm is not installed (the mlx-vlm extra)", allow_module_level=True)

NUM_TOKENS = (EDGE // PATCH) ** 2
"""Of a picture of LLaVA's."""


@pytest.fixture(scope="module")
def web(_module_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server of two folders, one of which sees."""
    folder = tmp_path_factory.mktemp("models")
    paths = [seeing_folder(folder / "seeing", "llava-clip"), tiny_folder(folder / "blind")]
    settings = {"ctx_size": 512, "threads": 1, "slots": 2, "isolation": "thread"}
    make = partial(Runtime, models=[str(path) for path in paths], **settings)
    server = _module_servers(make)
    server.ready.result(60.0)
    with httpx.Client(base_url=server.url, timeout=60.0) as found:
        yield found


def noise(seed: int) -> str:
    """A small PNG as a data URI."""
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    return uri(encoded(Pillow.fromarray(pixels)))


def asked(web: httpx.Client, *urls: str, model: str = "seeing", text: str = "What is it?") -> httpx.Response:
    """A greedy answer about pictures."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    return web.post("/v1/chat/completions", json=body)


def said(answer: httpx.Response) -> str:
    """The text of an answer that is one."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.long
def test_a_folder_that_sees_says_so_and_looks(web: httpx.Client) -> None:
    """SPEC F10, V1: another picture is another answer; several are each in their place."""
    models = {each["id"]: each["meta"] for each in web.get("/v1/models").json()["data"]}
    assert models["seeing"]["pictures"] == "ready"
    one, other = said(asked(web, noise(1))), said(asked(web, noise(2)))
    assert one != other
    assert len({said(asked(web, noise(a), noise(b))) for a, b in ((1, 2), (2, 1), (1, 1))}) == 3
    assert said(asked(web, noise(1))) == one
    text = asked(web)
    assert said(text) != one


def num_encoded(web: httpx.Client) -> float:
    """Pictures that were encoded so far."""
    lines = web.get("/metrics").text.splitlines()
    found = [line.split()[-1] for line in lines if "images_encoded" in line and not line.startswith("#")]
    return sum(map(float, found))


def test_the_same_picture_is_encoded_once(web: httpx.Client) -> None:
    """SPEC F10, C11: by another question too; the prompt before it and itself are taken from the cache."""
    asked(web, noise(7), text="And this?")
    before = num_encoded(web)
    again = asked(web, noise(7), text="And this one?")
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > NUM_TOKENS
    assert num_encoded(web) == before > 0


def test_answers_about_pictures_beside_each_other_are_those_alone(web: httpx.Client) -> None:
    """SPEC F10, E1: three for two slots, each given twice."""
    alone = [said(asked(web, noise(seed))) for seed in (4, 5, 6)]
    with ThreadPoolExecutor(6) as pool:
        beside = list(pool.map(lambda seed: said(asked(web, noise(seed))), (4, 5, 6, 4, 5, 6)))
    assert beside == alone * 2


@pytest.mark.long
def test_a_folder_that_was_not_made_to_see_says_so(web: httpx.Client) -> None:
    """SPEC F10, V1: a 400 with the picture's place; its text is served."""
    refused = asked(web, noise(1), model="blind")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "messages.0.content.0"
    assert "takes text, no pictures: it has no vision" in error["message"]
    assert said(asked(web, model="blind"))
