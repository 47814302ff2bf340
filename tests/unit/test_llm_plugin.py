"""The plugin for `llm`, with its own library and a real engine."""

import json
from importlib.metadata import entry_points

import jsonschema
import pytest

llm = pytest.importorskip("llm")
from stoker import llm_plugin  # noqa: E402 - it needs the library


@pytest.fixture
def model(monkeypatch):
    """The embedded model, as the plugin offers it."""
    offered = []
    llm_plugin.register_models(offered.append)
    found = {one.model_id: one for one in offered}
    if "stoker/smollm2-135m-instruct" not in found:
        pytest.skip("the embedded model is not installed")
    chosen = found["stoker/smollm2-135m-instruct"]
    yield chosen
    chosen.close()


def test_the_library_finds_the_plugin():
    """An entry point of its group, so that `llm -m stoker/NAME` works."""
    assert "stoker.llm_plugin" in {entry.value for entry in entry_points(group="llm")}


def test_a_conversation_goes_on_and_schemas_are_kept_to(model):
    """I1, D2: system prompt once, options, usage; JSON of a schema."""
    conversation = model.conversation()
    first = conversation.prompt("Name one river.", system="Be brief.", temperature=0, max_tokens=8)
    text = first.text()
    assert text
    assert first.usage().output <= 8
    second = conversation.prompt("And another?", temperature=0, max_tokens=4)
    assert second.text()
    assert second.usage().input > first.usage().input
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    jsonschema.validate(json.loads(model.prompt("A number", schema=schema, temperature=0).text()), schema)


def test_the_turns_are_those_of_the_conversation():
    """A system prompt that stays the same is said once."""

    class Prompt:
        def __init__(self, prompt, system=None):
            self.prompt, self.system = prompt, system

    class Response:
        def __init__(self, prompt, text):
            self.prompt, self._text = prompt, text

        def text(self):
            return self._text

    class Conversation:
        responses = (Response(Prompt("one", "s"), "1"), Response(Prompt("two", "s"), "2"))

    turns = llm_plugin._messages(Prompt("three", "t"), Conversation())
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "s"),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("assistant", "2"),
        ("system", "t"),
        ("user", "three"),
    ]
