"""Conversations through the library: tools, reasoning, and how their answers' form is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import jsonschema
import msgspec
import pytest

import stoker.sync
from planning import planned_chat
from stoker import Runtime
from stoker.chat.answer import AnswerForm
from stoker.chat.reasoning import THINK
from stoker.chat.tools.formats.hermes import HERMES
from stoker.chat.tools.formats.table import FORMATS
from stoker.client.requests.stream import TextDelta, ToolCall
from stoker.client.requests.table import RequestTable
from stoker.client.store.file import KeptFile, KeptFolder
from stoker.errors import InvalidRequestError
from stoker.ipc.commands import Submit
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import Usage
from stoker.models.chat_templates import CHATML
from stoker.tasks.chat import PLAIN, chat_deltas, form_of, offer_of

FAKE = "fake:eog_period=0"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
HELLO = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "look"}}
FORM = AnswerForm(HERMES, ("f",), THINK)
TEXT = '<think>Hm.</think>So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


async def spoken(*texts: str, index: int = 0) -> AsyncGenerator[TextDelta, None]:
    """These pieces, the last of which ends with usage."""
    for text in texts[:-1]:
        yield TextDelta(text=text, index=index, token_ids=[1])
    yield TextDelta(text=texts[-1], index=index, finish_reason=FinishReason.STOP, usage=Usage())


@pytest.mark.parametrize("pieces", [[TEXT, ""], [*TEXT, ""], [TEXT]])
async def test_calls_come_whole_and_reasoning_apart(pieces: list[str]) -> None:
    """SPEC D7, D4: however the text is cut; the end, its usage and its reason are those of the answer."""
    deltas = [delta async for delta in chat_deltas(spoken(*pieces), FORM)]
    assert "".join(delta.text for delta in deltas) == "So:"
    assert "".join(delta.reasoning for delta in deltas) == "Hm."
    (call,) = [call for delta in deltas for call in delta.tool_calls]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS
    assert deltas[-1].usage is not None
    assert sum(len(delta.token_ids) for delta in deltas) == len(pieces) - 1
    assert all(delta.text or delta.reasoning or delta.tool_calls for delta in deltas[:-1])


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
async def test_a_forced_call_validates_in_every_format(name: str) -> None:
    """SPEC D12, D2: from a model that knows nothing, streamed a token at a time."""
    async with stoker.Runtime(FAKE, isolation="thread") as runtime:
        answer = runtime.chat(
            HELLO, tools=TOOLS, tool_choice=NAMED, tool_format=name, max_tokens=600, seed=3, temperature=0.5
        )
        deltas = [delta async for delta in answer]
    (call,) = [call for delta in deltas for call in delta.tool_calls]
    arguments = json.loads(call.arguments)
    assert call.name == "look"
    jsonschema.validate(arguments, SCHEMA)
    assert "".join(delta.text for delta in deltas) == ""


async def test_what_began_as_a_call_and_was_none_is_text() -> None:
    """SPEC D7: nothing is lost."""
    broken = 'x <tool_call>{"name": "f", "arguments": {"a": '
    deltas = [delta async for delta in chat_deltas(spoken(*broken, ""), FORM)]
    assert "".join(delta.text for delta in deltas) == broken
    assert not any(delta.tool_calls for delta in deltas)
    assert deltas[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_validates(choice: object) -> None:
    """SPEC D7, D2: by the library as over HTTP, from a model that knows nothing."""
    async with Runtime(FAKE, isolation="thread") as runtime:
        for seed in range(4):
            chat = runtime.chat(
                HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=300
            )
            deltas = [delta async for delta in chat]
            (call,) = [call for delta in deltas for call in delta.tool_calls]
            assert isinstance(call, ToolCall)
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
            assert (call.name, deltas[-1].finish_reason) == ("look", FinishReason.TOOL_CALLS)
            assert "".join(delta.text for delta in deltas) == ""


async def test_a_prompt_shows_the_tools_and_the_calls_so_far() -> None:
    """SPEC D7: `render_chat` gives what `chat` runs, for a template that knows no tools as well."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"city": "Ulm"}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    async with Runtime(FAKE, isolation="thread") as runtime:
        prompt = runtime.render_chat(turns, tools=TOOLS)
        assert runtime.plan_chat(turns, offer_of(TOOLS)).prompt == prompt
        for told in ('"name": "look"', "maxLength", '{"city": "Ulm"}', "sunny"):
            assert told in prompt
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            await anext(runtime.chat(HELLO, tools=TOOLS, tool_choice="sometimes"))
        with pytest.raises(InvalidRequestError, match="forces a call"):
            await anext(runtime.chat(HELLO, tools=TOOLS, tool_choice="required", regex="a"))


def test_a_script_offers_tools_too() -> None:
    """I9: stoker.sync mirrors it."""
    with stoker.sync.Runtime(FAKE, isolation="thread") as runtime:
        deltas = list(runtime.chat(HELLO, tools=TOOLS, tool_choice=NAMED, max_tokens=300, seed=1))
        assert [call.name for delta in deltas for call in delta.tool_calls] == ["look"]
        assert "look" in runtime.render_chat(HELLO, tools=TOOLS)


def info(template: str) -> ModelInfo:
    """A model with that chat template."""
    given = dict.fromkeys(("num_params", "size_bytes", "n_vocab", "n_ctx", "n_ctx_train", "n_batch"), 0)
    given |= {"num_slots": 1, "num_threads": 1, "memory_bytes": {}, "chat_template": template}
    names = (
        "id",
        "path",
        "label",
        "model_class",
        "architecture",
        "description",
        "kv_type",
        "flash_attention",
    )
    return msgspec.convert(given | dict.fromkeys(names, "x"), ModelInfo)


def test_the_form_of_an_answer_is_kept_with_its_request() -> None:
    """SPEC L2, D7: it reads the same after a restart; what nothing is looked for in keeps nothing."""
    template = "{{ tools }}<tool_call></tool_call></think>{% for m in messages %}{{ m.content }}{% endfor %}"
    plan = planned_chat(info(template), HELLO, offer_of(TOOLS))
    assert form_of(plan.fields({})["note"]) == plan.form == AnswerForm(HERMES, ("look",), THINK)
    assert planned_chat(info(CHATML), HELLO).fields({})["note"] == b""
    assert [form_of(note) for note in (b"", b"\xc1", b"\x01")] == [PLAIN] * 3


def test_the_types_of_arguments_are_kept_with_a_request() -> None:
    """SPEC D12: a call whose text does not tell them is read the same after a restart."""
    template = "{{ tools }}<function=f><parameter=a>{% for m in messages %}{{ m.content }}{% endfor %}"
    plan = planned_chat(info(template), HELLO, offer_of(TOOLS))
    form = form_of(plan.fields({})["note"])
    assert form == plan.form
    assert form.texts == {"look": {"city": ()}}


def test_a_models_format_holds_where_a_request_names_none() -> None:
    """SPEC D12: the request, then the model's setting, then the template."""
    model = msgspec.structs.replace(info(CHATML), tool_format="kimi")
    for asked, name in ((None, "kimi"), ("glm", "glm")):
        syntax = planned_chat(model, HELLO, offer_of(TOOLS, tool_format=asked)).form.syntax
        assert syntax is not None
        assert syntax.name == name


HARMONY = "{{ tools }}<|channel|><|message|>{% for m in messages %}{{ m.content }}{% endfor %}"
FORMAT = Constraint(kind=ConstraintKind.JSON_SCHEMA, source="{}", asked_as="response_format")


def test_a_constraint_of_an_answer_of_messages_begins_in_the_last_one() -> None:
    """SPEC D12: a format behind the header of the answer, a forced call behind what may be reasoning."""
    plan = planned_chat(info(HARMONY), HELLO)
    held = plan.fields({"constraint": FORMAT})["constraint"]
    assert (held.reasoning_start, held.reasoning_end) == ("", "<|channel|>final<|message|>")
    forced = planned_chat(info(HARMONY), HELLO, offer_of(TOOLS, "required")).fields({})["constraint"]
    assert (forced.reasoning_start, forced.reasoning_end) == ("<|channel|>analysis<|message|>", "<|end|>")
    assert {"<|channel|>", "<|message|>", "<|call|>"} <= set(plan.fields({})["spelled"])


async def test_a_kept_request_shows_its_note(tmp_path: Path) -> None:
    """SPEC L2: a later program has it from the file."""
    request = GenerateRequest(prompt="x", model="m", is_chat=True, note=b"form")
    former = KeptFolder(tmp_path)
    former.write(KeptFile(submit=Submit(request_id="a", request=request), shown=[]))
    former.close()
    table = RequestTable(tmp_path)
    (record,) = await table.take_up(["m"])
    table.add(record)
    assert [kept.note for kept in table.kept()] == [b"form"]
    table.close()


def test_what_a_conversation_adds_to_a_request_joins_what_was_asked_for() -> None:
    """SPEC D3, D7: stop strings of both; the constraint waits behind the reasoning."""
    template = "{{ tools }}<tool_call></tool_call></think>{% for m in messages %}{{ m.content }}{% endfor %}"
    plan = planned_chat(info(template), HELLO, offer_of(TOOLS, is_parallel=False))
    fields = plan.fields({"stop": "end", "seed": 3})
    assert (fields["stop"], fields["seed"], fields["is_chat"]) == (("end", "</tool_call>"), 3, True)
    assert fields["constraint"] is None
    forced = planned_chat(info(template), HELLO, offer_of(TOOLS, "required")).fields({})["constraint"]
    assert (forced.param, forced.reasoning_start, forced.reasoning_end) == ("tools", "<think>", "</think>")
