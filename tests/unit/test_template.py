"""Chat templates: the prompt a model was trained on, and foreign code kept within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from stoker.chat.conversation import Conversation, Layout
from stoker.chat.template import MAX_TEMPLATE_CHARS, ChatTemplate
from stoker.client.worker.jobs import RenderChat
from stoker.client.worker.pool import Bounds, WorkerPool
from stoker.errors import InvalidRequestError, UnsupportedError, WorkLimitError
from stoker.models.chat_templates import CHATML

LLAMA2 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}"
    "{% endif %}{% endfor %}"
)
BOUNDS = Bounds(limit_s=1.0, max_bytes=64 * 1024**2)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A pool of tight bounds."""
    pool = WorkerPool(BOUNDS)
    yield pool
    pool.close()


def render(source: str, messages: Sequence[dict[str, Any]] = (USER,), **extra: Any) -> str:
    """One rendering with the usual tokens."""
    return ChatTemplate(source, "<s>", "</s>").render(list(messages), **extra)


def test_a_conversation_is_laid_out_by_the_models_own_template() -> None:
    """D10: the template's roles, special tokens and trimming appear as it writes them."""
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"}, USER]
    assert render(LLAMA2, messages) == "<s>[INST] Hi [/INST] Hello </s><s>[INST] Hi [/INST]"


def test_the_opening_of_the_answer_is_left_out_when_not_wanted() -> None:
    """D10: add_generation_prompt reaches the template."""
    prompt = ChatTemplate(CHATML).render([USER], add_generation_prompt=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n"


def test_text_parts_are_joined_for_templates_that_know_text_only() -> None:
    """D10: OpenAI content parts are lines of one text, as vLLM and llama-server have it."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])


def test_other_parts_reach_the_template_as_they_are() -> None:
    """D10: nothing but text is touched."""
    source = "{% for part in messages[0].content %}[{{ part.type }}]{% endfor %}"
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert render(source, [{"role": "user", "content": content}]) == "[text][image_url]"


SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (SMOLVLM, "<|im_start|>User: <__media__>Hi<end_of_utterance>\nAssistant: Yes<end_of_utterance>\n"),
        (LLAVA, "USER: <__media__>Hi ASSISTANT: Yes "),
        (CHATML, "user\n<__media__>Hi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"),
    ],
    ids=["smolvlm", "llava", "chatml"],
)
def test_a_template_that_writes_parts_alone_gets_its_texts_in_parts(source: str, prompt: str) -> None:
    """D10: those of models that see would leave out every text that is no part."""
    told = [{"role": "user", "content": "<__media__>Hi"}, {"role": "assistant", "content": "Yes"}]
    assert prompt in render(source, told)
    parts = [{"type": "text", "text": "<__media__>Hi"}]
    assert render(source, [{"role": "user", "content": parts}, told[1]]) == render(source, told)


def test_templates_find_what_transformers_gives_them() -> None:
    """D10: loop controls, tojson without HTML escapes, strftime_now, tools, generation blocks."""
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "|{{ tools | tojson }}|{{ strftime_now('%Y') | length }}|{{ enable_thinking }}"
        "|{% generation %}x{% endgeneration %}|{{ 'a' ~ 1 ~ none_such ~ 'b' }}"
    )
    prompt = render(source, tools=[{"name": "<é>"}], enable_thinking=False)
    assert prompt == '01|[{"name": "<é>"}]|4|False|x|a1b'


def test_blocks_leave_no_blank_lines_behind() -> None:
    """D10: trim_blocks and lstrip_blocks are on, as templates expect."""
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_macros_namespaces_and_slices_work() -> None:
    """D10: the constructs that real templates use survive the metering."""
    source = (
        "{% macro wrap(text) %}<{{ text }}>{% endmacro %}"
        "{% set ns = namespace(seen=0) %}"
        "{% for m in messages[::-1] %}{% set ns.seen = ns.seen + 1 %}{{ wrap(m.content.split(' ')[-1]) }}"
        "{% else %}none{% endfor %}{{ ns.seen }}"
        "{{ messages | map(attribute='content') | join(',') }}{{ 'a-b'.replace('-', '+') }}"
    )
    assert render(source, [USER, {"role": "user", "content": "a b"}]) == "<b><Hi>2Hi,a ba+b"


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    """What bad input gets: raise_exception becomes a typed error with the template's words."""
    with pytest.raises(InvalidRequestError, match="only user and assistant roles are supported"):
        render(LLAMA2, [{"role": "tool", "content": "x"}])


def test_a_template_that_trips_over_a_message_is_a_typed_error() -> None:
    """What bad input gets: a TypeError inside the template is the caller's message, not a crash."""
    with pytest.raises(InvalidRequestError, match="failed on the messages"):
        render("{{ messages[0].content + 1 }}")


def test_a_template_with_a_syntax_error_says_that_the_model_cannot_chat() -> None:
    """What bad input gets: the model is at fault, at first use and not before."""
    template = ChatTemplate("{% for %}")
    with pytest.raises(UnsupportedError, match="broken"):
        template.render([USER])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 7}], "messages[1].content"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: list[dict[str, Any]], param: str) -> None:
    """What bad input gets: the error names the entry."""
    with pytest.raises(InvalidRequestError) as caught:
        render(LLAMA2, messages)
    assert caught.value.param == param


def test_what_a_filter_gives_is_a_list_in_json() -> None:
    """D10: `map` and its like end in lists, as llama.cpp's own templates rely on."""
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


def test_a_caller_cannot_replace_what_the_template_is_given() -> None:
    """What bad input gets: template arguments do not shadow the messages or tokens."""
    with pytest.raises(InvalidRequestError, match="bos_token"):
        render(LLAMA2, bos_token="x")  # noqa: S106 - no password


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}{{ ''|attr('__class__') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.extend([1]) }}",
        "{{ messages.__setitem__(0, 1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_a_hostile_template_reaches_nothing_private(source: str) -> None:
    """D10: private attributes and mutation are refused."""
    with pytest.raises(InvalidRequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10 ** 9) | list | length }}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    ],
)
def test_a_hostile_template_cannot_compute_without_end(source: str) -> None:
    """D10: loops and recursion run into the budget."""
    with pytest.raises(InvalidRequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(x='a' * 99999) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a' * 99999) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a' * 99999) %}{% for i in range(40) %}"  # noqa: ISC004 - one source
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ ('a' * 1000000).replace('a', 'a' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'a' * 1000000) }}",
        "{{ ('a' * 1000000).join(['a'] * 100000) }}",
        "{{ (['a' * 1000000] * 100000) | join }}",
        "{{ ([{'k': 'a' * 1000000}] * 100000) | join(attribute='k') }}",
        "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
        "{{ ['a' * 1000000] * 1000 }}",
        "{{ (['a' * 1000000] * 1000) | string }}",
        "{{ (['a' * 1000000] * 1000) | tojson }}",
        "{{ '' ~ ['a' * 1000000] * 1000 }}",
        "{{ '%s' % [['a' * 1000000] * 1000] }}",
        "{{ lipsum(100000) }}",
        "{% set x = 'a ' * 4000000 %}{% for i in range(300) %}{% set y = x.split(' ') %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(1000) %}{% set n.x = [n.x, n.x] %}{% endfor %}"  # noqa: ISC004 - one source
        "{{ n.x | tojson }}",
        "{{ ('a' * 9999 ~ '\\n') * 999 | wordwrap(1) }}",
        "{% set x = ['a'] %}{% for y in x if x.append(y) %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_ended_where_it_takes_too_much(pool: WorkerPool, source: str) -> None:
    """D10, S9: no operator, method, filter or block fills the memory or goes on for ever."""
    conversation = Conversation(messages=[USER], template=source)
    with pytest.raises((InvalidRequestError, UnsupportedError, WorkLimitError)):
        pool.submit(RenderChat(model="m", conversation=conversation), Layout).result()


def test_what_a_template_does_to_a_list_is_gone_with_its_rendering() -> None:
    """D10: Kimi K2's keep a queue; the next rendering gets messages, tools and arguments as they were."""
    source = (
        "{% set queue = [] %}{% for m in messages %}{% set _ = queue.append(m.role) %}{% endfor %}"
        "{{ queue.pop(0) }}{% set _ = messages.pop() %}{% set _ = messages[0].parts.append('b') %}"
        "{% set _ = tools[0].names.append('t') %}{% set _ = more.append(1) %}"
        "{{ messages | length }}{{ messages[0].parts | join }}{{ tools[0].names | join }}{{ more | length }}"
    )
    messages, tools, more = [{**USER, "parts": ["a"]}, USER], [{"names": ["s"]}], [0]
    template = ChatTemplate(source)
    assert [template.render(messages, tools=tools, more=more) for _ in range(2)] == ["user1abst2"] * 2
    assert (len(messages), messages[0]["parts"], tools, more) == (2, ["a"], [{"names": ["s"]}], [0])


def test_the_budget_is_per_rendering() -> None:
    """D10: a template in use for long does not run out."""
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}ok")
    assert [template.render([USER]) for _ in range(3)] == ["ok"] * 3


def test_an_overlong_template_is_refused() -> None:
    """D10: the source is bounded before it is compiled."""
    with pytest.raises(UnsupportedError, match=str(MAX_TEMPLATE_CHARS)):
        render("x" * (MAX_TEMPLATE_CHARS + 1))
