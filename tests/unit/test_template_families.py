# ruff: noqa: E501 - templates are cut where they mean something
"""Templates in the shapes that families of models use, laid out by a worker process within its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stoker.chat.conversation import Conversation, Layout
from stoker.client.worker.jobs import RenderChat
from stoker.client.worker.pool import WorkerPool
from stoker.tasks.chat import offer_of

CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"city": "Ulm"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "sunny"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
FAMILIES = {
    # Macros over a schema, a date, tojson with indentation, ipython's role for results.
    "llama 3": (
        "{{- bos_token }}{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul' %}"
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\n{{ 'Today: ' + date + '\n' }}{{ system }}"
        "{%- if tools is not none %}{%- for t in tools %}{{ t | tojson(indent=4) }}{%- endfor %}{%- endif %}"
        "<|eot_id|>{%- for m in messages %}{%- if 'tool_calls' in m %}"
        "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
        "{%- set f = m.tool_calls[0].function %}"
        '{{- \'{"name": "\' + f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}}'
        "{%- elif m.role == 'tool' or m.role == 'ipython' %}"
        "<|start_header_id|>ipython<|end_header_id|>\n\n"
        "{%- if m.content is mapping or (m.content is iterable and m.content is not string) %}"
        "{{ m.content | tojson }}{%- else %}{{ m.content }}{%- endif %}"
        "{%- else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
        "{%- endif %}<|eot_id|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{%- endif %}"
    ),
    # Neighbouring messages looked at, arguments given as text or as an object.
    "qwen 2.5": (
        "{%- if tools %}<|im_start|>system\n{{ messages[0]['content'] }}\n<tools>"
        '{%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{%- endfor %}\n</tools><|im_end|>\n{%- endif %}'
        "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{%- elif m.role == 'assistant' %}<|im_start|>{{ m.role }}"
        "{%- for tool_call in m.tool_calls %}{%- if tool_call.function is defined %}"
        "{%- set tool_call = tool_call.function %}{%- endif %}\n<tool_call>\n"
        '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
        "{%- endfor %}<|im_end|>\n"
        "{%- elif m.role == 'tool' %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
        "<|im_start|>user{%- endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{%- endif %}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    ),
    # A namespace, turns from behind, methods of texts, split at tags, a switch for reasoning.
    "qwen 3": (
        "{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string"
        " and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
        "{%- set ns.multi_step_tool = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
        "{%- if m.role == 'assistant' and '</think>' in content %}"
        "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{%- endfor %}"
        "{{ (tools or []) | map(attribute='function.name') | join(', ') }}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}"
        "{%- endif %}"
    ),
    # Tools before the last user turn, ids of nine characters, roles that alternate.
    "mistral": (
        "{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
        "{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
        "{%- for m in loop_messages %}{%- if m.role == 'user' %}"
        "{%- if tools is not none and m == user_messages[-1] %}[AVAILABLE_TOOLS][{%- for tool in tools %}"
        '{%- set tool = tool.function %}{{- \'{"type": "function", "function": {\' }}'
        "{%- for key, val in tool.items() if key != 'return' %}{%- if val is string %}"
        '"{{ key }}": "{{ val }}"{%- else %}"{{ key }}": {{ val|tojson }}{%- endif %}'
        "{%- if not loop.last %}, {% endif %}{%- endfor %}}}{%- endfor %}][/AVAILABLE_TOOLS]{%- endif %}"
        "[INST]{{ m.content }}[/INST]"
        "{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][{%- for c in m.tool_calls %}"
        "{%- set out = c.function | tojson %}{{ out[:-1] }}{%- if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs have nine characters') }}{%- endif %}"
        ', "id": "{{ c.id }}"}{%- endfor %}]{{ eos_token }}'
        "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ m.content | string | tojson }}, "
        '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{%- else %}{{ raise_exception('Only user, assistant and tool roles') }}{%- endif %}{%- endfor %}"
    ),
    # No system turn, two roles that alternate.
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "phi": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
        "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    # State over turns in one namespace, texts built with `~` and with fences.
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=true, is_tool=false, system='') %}"
        "{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}"
        "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{ '<|User|>' + m['content'] }}{%- endif %}"
        "{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}"
        "{%- for tool in m['tool_calls'] %}{{ '<|tool_call_begin|>' + tool['type'] + '<|tool_sep|>'"
        " + tool['function']['name'] + '\n```json\n' ~ (tool['function']['arguments'] | tojson) ~ '\n```' }}"
        "{%- endfor %}{%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{%- elif m['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
        "{{ '<|tool_output_begin|>' + m['content'] + '<|tool_output_end|>' }}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}"
    ),
    # Recursive macros that write a schema as TypeScript.
    "gpt-oss": (
        "{%- macro kind(spec, depth) -%}{%- if spec.type == 'array' -%}{{ kind(spec['items'], depth + 1) }}[]"
        "{%- elif spec.type == 'object' and spec.properties -%}{ {%- for name, one in spec.properties.items() %}"
        "{{ '\n' }}{{ name }}{{ '' if name in (spec.required or []) else '?' }}: {{ kind(one, depth + 1) }},"
        "{%- endfor %} }{%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}"
        "{%- else -%}{{ spec.type | default('any') }}{%- endif -%}{%- endmacro -%}"
        "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}"
        "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
        "Reasoning: {{ reasoning_effort }}<|end|>"
        "{%- for tool in tools or [] %}namespace functions { type {{ tool.function.name }} = (_: "
        "{{- kind(tool.function.parameters, 0) }}) => any; }{%- endfor %}"
        "{%- for m in messages %}{%- if m.role == 'assistant' and 'tool_calls' in m %}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
    ),
    # Types of JSON as names of Python's, in a macro of its own.
    "hermes": (
        '{%- macro to_type(spec) %}{%- set names = {"string": "str", "number": "float", "array": "list"} %}'
        "{%- if spec.type in names %}{{ names[spec.type] }}{%- elif spec.type is defined and spec.type == 'object' %}"
        "{%- if spec.additionalProperties is defined %}dict[str, {{ to_type(spec.additionalProperties) }}]"
        "{%- else %}dict{%- endif %}{%- else %}Any{%- endif %}{%- endmacro %}"
        "{{ bos_token }}<|im_start|>system\n<tools>{%- for tool in tools or [] %}"
        "{{ tool.function.name }}({%- for name, f in tool.function.parameters.properties | items %}"
        "{{ name + ': ' + to_type(f) }}{%- if not loop.last %}, {%- endif %}{%- endfor %})"
        "{{ tool.function | tojson }}{%- endfor %}</tools><|im_end|>\n"
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{%- for call in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{%- endfor %}{{ m.content }}<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # Tests of types, dictsort, replace, upper, block assignments, indices kept in a namespace.
    "command r": (
        "{{ bos_token }}{%- set preamble %}## Tools{% for t in tools or [] %}\n{{ t.function.name | upper }}:"
        "{%- for name, spec in t.function.parameters.properties | dictsort %} {{ name }}={{ spec.type }}"
        "{%- endfor %}{% endfor %}{%- endset %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
        "{{ preamble | replace('\n', '\n\n') | indent(2) }}<|END_OF_TURN_TOKEN|>"
        "{%- set ns = namespace(at=0) %}{%- for m in messages %}{%- if m.role | lower == 'tool' %}"
        "{%- set ns.at = ns.at + 1 %}<results>{{ loop.index0 }}.{{ ns.at }} {{ m.content }}</results>"
        "{%- elif m.tool_calls is defined %}Action: ```json\n[{%- for c in m.tool_calls %}"
        "{{ {'tool_name': c.function.name, 'parameters': c.function.arguments} | tojson(indent=4) }}"
        "{%- endfor %}]```{%- else %}<|START_OF_TURN_TOKEN|>{{ m.role | upper }}{{ m.content }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}<|CHATBOT_TOKEN|>{%- endif %}"
    ),
    # Ids of calls in a queue: a list in a namespace that grows and shrinks.
    "kimi": (
        "{%- set queue = namespace(ids=[]) %}{{ tools | tojson }}{%- for m in messages %}"
        "{%- for call in m.tool_calls or [] %}{%- set id = 'functions.' ~ call.function.name ~ ':' ~ loop.index0 %}"
        "{%- set _ = queue.ids.append(id) %}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{%- endfor %}"
        "{%- if m.role == 'tool' %}{%- set id = queue.ids.pop(0) %}Result of {{ id }}: {{ m.content }}"
        "{%- else %}<|im_{{ m.role }}|>{{ m.content }}{%- endif %}<|im_end|>{%- endfor %}"
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """The pool that a runtime has."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_laid_out_within_the_bounds(pool: WorkerPool, family: str) -> None:
    """S9: nothing that real templates do is refused; every turn is there, and the tools are told."""
    conversation = Conversation(
        messages=TURNS, offer=offer_of(TOOLS), template=FAMILIES[family], bos_text="<s>", eos_text="</s>"
    )
    prompt = pool.submit(RenderChat(model=family, conversation=conversation), Layout).result().prompt
    for told in ("Weather?", "sunny", "Thanks", "Ulm"):
        assert told in prompt
    assert "look" in prompt.lower()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_is_laid_out_within_the_bounds(pool: WorkerPool, family: str) -> None:
    """S9: thousands of turns of a megabyte take a fraction of the limit."""
    turns = [{"role": role, "content": "word " * 100} for _ in range(1000) for role in ("user", "assistant")]
    conversation = Conversation(messages=[*turns, TURNS[1]], template=FAMILIES[family], bos_text="<s>")
    assert (
        "Weather?" in pool.submit(RenderChat(model=family, conversation=conversation), Layout).result().prompt
    )


def test_schemas_that_a_template_cannot_write_are_told_in_plainer_words(pool: WorkerPool) -> None:
    """D10: a union with null recurses for ever in Hermes', a missing description ends Command R's."""
    parameters = {
        "type": "object",
        "properties": {
            "maybe": {"type": ["null", "integer"], "description": "Or not."},
            "either": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
            "one": {"enum": ["a", "b"]},
            "many": {"type": "array", "items": {"const": 3}},
            "nested": {"type": "object", "properties": {"deep": True}},
        },
    }
    template = (
        "{%- macro kind(spec) %}{%- if spec.type == 'array' %}{{ 'list[' + kind(spec['items']) + ']' }}"
        "{%- elif spec.type == 'object' %}{{ 'dict[' + kind(spec.additionalProperties) + ']' }}"
        "{%- elif spec.type in ['string', 'integer', 'boolean'] %}{{ spec.type }}"
        "{%- else %}{%- for one in spec.type %}{{ kind({'type': one}) }}{%- endfor %}{%- endif %}{%- endmacro %}"
        "<tool_call>{%- for tool in tools or [] %}{%- for name, spec in tool.function.parameters.properties | items %}"
        "{{ name + ': ' + kind(spec) + '; ' + spec.description }}|{%- endfor %}{%- endfor %}"
        "{%- for m in messages %}{{ m.content }}{%- endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    conversation = Conversation(messages=[TURNS[1]], offer=offer_of(tools), template=template)
    prompt = pool.submit(RenderChat(model="m", conversation=conversation), Layout).result().prompt
    told = "maybe: integer; Or not.|either: boolean; |one: string; |many: list[integer]; |nested: dict[string]; |"
    assert prompt == f"<tool_call>{told}Weather?"
