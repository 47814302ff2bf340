"""Whether a model thinks before it answers: what the request says, else the model, else the server."""

from __future__ import annotations

import pytest

from stoker import Runtime
from stoker.errors import InvalidRequestError
from stoker.ipc.model import ModelInfo
from stoker.server.anthropic.messages import MessagesRequest
from stoker.server.openai.responses.body import ResponsesRequest
from stoker.settings import EngineSettings
from stoker.tasks.chat import chat_job

TEMPLATE = "{{ enable_thinking }} {{ reasoning_effort }}"
BARE = {
    "id": "m",
    "path": "m",
    "n_ctx": 64,
    "n_batch": 64,
    "num_slots": 1,
    "num_threads": 1,
    "kv_type": "f16",
}


@pytest.mark.parametrize(
    ("default", "given", "made"),
    [
        (None, {}, {}),
        (False, {}, {"enable_thinking": False}),
        ("high", {"a": 1}, {"enable_thinking": True, "reasoning_effort": "high", "a": 1}),
        ("none", {}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ("high", {"enable_thinking": False}, {"enable_thinking": False}),
        (False, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_a_request_says_more_than_its_model(default, given, made):
    """SPEC W9: what it says of thinking replaces all that holds by default."""
    info = ModelInfo(**BARE, chat_template=TEMPLATE, model_class="decoder", thinking=default)
    job, _ = chat_job(info, "Hi", template_args=given)
    assert job.conversation.args == made


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        lambda fields: ResponsesRequest(input="x", reasoning={"effort": "high"}, **fields),
        lambda fields: MessagesRequest(
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            thinking={"type": "enabled", "budget_tokens": 1024},
            **fields,
        ),
    ],
)
def test_the_fields_of_the_top_level_are_those_of_every_api(body, fields, made):
    """SPEC W9: they say more than the API's own field."""
    args = body(fields).to_chat().body["chat_template_kwargs"]
    assert {name: args[name] for name in made} == made


@pytest.mark.parametrize(("given", "made"), [(True, True), ("off", False), ("low", "low"), (None, None)])
async def test_a_server_has_a_default_for_its_models(given, made):
    """SPEC W9: a setting, which their description shows."""
    fields = {} if given is None else {"thinking": given}
    async with Runtime(model="fake:", isolation="thread", **fields) as runtime:
        assert runtime.models[0].thinking == made


def test_a_default_that_is_none_of_these_is_refused():
    """SPEC S3: with the setting's name."""
    with pytest.raises(InvalidRequestError) as caught:
        EngineSettings(thinking="a lot")
    assert caught.value.param == "thinking"
