"""Answers end where their template ends a turn, also where the vocabulary does not say so."""

from __future__ import annotations

import httpx
import pytest

from stoker.chat.turn_ends import turn_ends_of
from stoker.ipc.request import FinishReason
from stoker.runtime import Runtime
from stoker.server.app import create_app, server_context
from stoker.settings import ServerSettings
from stoker.tasks.chat import _with_stops

TURNS = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("<|im_start|>{{ messages }}<|im_end|>", ("<|im_end|>",)),
        ("<start_of_turn>{{ messages }}<end_of_turn>", ("<end_of_turn>",)),
        ("{{ messages }}<|eot_id|>", ("<|eot_id|>",)),
        ("<|assistant|>{{ messages }}<|end|>", ("<|end|>",)),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ messages }}<|end|>", ()),
        ("<|begin|>assistant<|think|><|end|>{{ messages }}", ()),
        ("[INST]{{ messages }}[/INST]", ()),
        (None, ()),
    ],
)
def test_a_template_shows_what_ends_its_turns(template, ends):
    """D10: the token that ends every text is left out, and what ends a part of an answer."""
    assert turn_ends_of(template, "</s>") == ends
    assert not turn_ends_of(template, ends[0] if ends else "")


def test_a_callers_stop_strings_leave_no_more_than_their_room():
    """D10: as many as a caller may give are still taken."""
    asked = tuple(map(str, range(16)))
    assert _with_stops(asked, ("<|im_end|>",)) == asked
    assert _with_stops(asked[:2], ("<|im_end|>",)) == ("0", "1", "<|im_end|>")


async def test_an_answer_ends_where_the_turn_does_though_that_is_many_tokens(tmp_path):
    """D10: of the fake a byte is a token; no client is told of a stop sequence that it did not give."""
    said = tmp_path / "said"
    said.write_bytes(b"Hello there.<|im_end|>\n<|im_start|>user\nAnd now")
    async with Runtime(f"fake:script={said}", isolation="thread") as runtime:
        answer = await runtime.ask(TURNS, max_tokens=100)
        assert (answer.text, answer.finish_reason) == ("Hello there.", FinishReason.STOP)
        app = create_app(server_context(runtime, ServerSettings(allowed_hosts=("box",))))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://box") as http:
            body = {"model": "default", "max_tokens": 100, "messages": TURNS}
            own = (await http.post("/v1/messages", json=body)).json()
            asked = (await http.post("/v1/messages", json=body | {"stop_sequences": ["there"]})).json()
    assert [own[name] for name in ("stop_reason", "stop_sequence")] == ["end_turn", None]
    assert own["content"][0]["text"] == "Hello there."
    assert [asked[name] for name in ("stop_reason", "stop_sequence")] == ["stop_sequence", "there"]
