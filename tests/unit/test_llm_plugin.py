"""The plugin for `llm`, with its own library and a real engine."""

import json
from importlib.metadata import entry_points

import jsonschema
import pytest

import tiny_models
from stoker.ipc.model import ModelClass, Pairing
from stoker.models.reader import ModelDescription
from stoker.models.store import ModelFile

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


def test_what_writes_no_text_is_not_offered_and_the_folder_of_the_settings_counts(tmp_path, monkeypatch):
    """STOKER_MODELS_DIR names the folder that is listed and the one the engine loads from."""
    tiny_models.write_llama(tmp_path / "decoder.gguf")
    tiny_models.write_mamba(tmp_path / "recurrent.gguf")
    tiny_models.write_bert(tmp_path / "encoder.gguf")
    tiny_models.write_t5(tmp_path / "translator.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("STOKER_MODELS_DIR", str(tmp_path))
    offered = {}
    llm_plugin.register_models(lambda model: offered.update({model.model_id: model}))
    assert offered.keys() - {"stoker/smollm2-135m-instruct"} == {"stoker/decoder", "stoker/recurrent"}
    decoder = offered["stoker/decoder"]
    try:
        assert decoder.prompt("a", max_tokens=1).usage().output == 1
    finally:
        decoder.close()


def test_a_wrong_setting_costs_llm_no_other_model(monkeypatch, capsys):
    """`llm` loads the plugin whatever it is asked for."""
    monkeypatch.setenv("STOKER_SLOTS", "banana")
    offered = []
    llm_plugin.register_models(offered.append)
    assert not offered
    assert "STOKER_SLOTS: 'banana' is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pairing", "template", "is_offered"),
    [(Pairing.NEEDS_PROJECTOR, None, False), (Pairing.NEEDS_PROJECTOR, "{{ messages }}", True)],
)
def test_a_reader_without_its_projector_is_offered_only_where_it_also_chats(pairing, template, is_offered):
    """Without a chat template there is nothing that it answers."""
    described = ModelDescription(
        model_class=ModelClass.DECODER,
        architecture="llama",
        n_ctx_train=64,
        pairing=pairing,
        chat_template=template,
    )
    file = ModelFile(id="reader", path="reader.gguf", size_bytes=1, description=described)
    assert llm_plugin._answers(file) is is_offered


@pytest.mark.long
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
