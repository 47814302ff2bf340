"""A last turn of the assistant that its answer goes on with, and system turns that a template refuses."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.chat.answer import AnswerForm
from stoker.chat.conversation import continuation_of, prepared_turn
from stoker.chat.template import ChatTemplate
from stoker.errors import InvalidRequestError

ASKED = [{"role": "user", "content": "Best book?"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content | default('') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('user last') }}{% endif %}"
    "<|User|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    "{# </think> #}"
)


def laid_out(template: str, messages: list[dict[str, Any]], **given: Any) -> tuple[str, AnswerForm]:
    """The prompt and how the answer to it is read."""
    continuation = continuation_of(messages, given)
    turn = prepared_turn(messages, template, continuation=continuation)
    chat = ChatTemplate(template, bos_text="<s>")
    prompt = turn.prompt(lambda turns, /, **changes: chat.render(turns, **(given | changes)))
    return prompt, turn.form(prompt)


def said(text: str | None, **fields: Any) -> list[dict[str, Any]]:
    """The question and what the assistant has said so far."""
    return [*ASKED, {"role": "assistant", "content": text, **fields}]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (CHATML, "<|im_start|>user\nBest book?<|im_end|>\n<|im_start|>assistant\nThe im_end "),
        (MISTRAL, "<s>[INST] Best book? [/INST] The im_end "),
        (
            GEMMA,
            "<s><start_of_turn>user\nBest book?<end_of_turn>\n<start_of_turn>model\nThe im_end ",
        ),
        (
            QWEN3,
            (
                "<|im_start|>user\nBest book?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
                "The im_end "
            ),
        ),
        (R1, "<|User|>Best book?<|Assistant|><think>\n\n</think>\n\nThe im_end "),
    ],
)
@pytest.mark.parametrize(
    "given", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}], ids=str
)
def test_a_last_turn_of_the_assistant_is_gone_on_with(
    template: str, prompt: str, given: dict[str, Any]
) -> None:
    """As the template writes the turn, without its end; the text is kept to the last space."""
    found, form = laid_out(template, said("The im_end "), **given)
    assert found == prompt
    assert not form.is_reasoning


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        (said("The"), {"add_generation_prompt": True}),
        (said("The"), {"continue_final_message": False}),
        (ASKED, {}),
    ],
)
def test_a_turn_that_is_not_to_be_gone_on_with_is_followed_by_a_new_one(
    messages: list[dict[str, Any]], given: dict[str, Any]
) -> None:
    """By the names of vLLM and transformers."""
    found, _ = laid_out(CHATML, messages, **given)
    assert found.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_without_text_is_a_new_one() -> None:
    """Nothing is there to go on with: the model opens its turn as ever."""
    assert laid_out(CHATML, said("")) == laid_out(CHATML, ASKED)
    assert laid_out(R1, said("")) == laid_out(R1, ASKED)


def test_reasoning_is_gone_on_with() -> None:
    """Reasoning alone: the answer begins inside it, whether a template knows the field or not."""
    end = "<|im_start|>assistant\n<think>\nI recall"
    for template in (QWEN3, CHATML + "{# <think> </think> #}"):
        prompt, form = laid_out(template, said(None, reasoning_content="I recall"))
        assert prompt.endswith(end)
        assert form.is_reasoning
    prompt, form = laid_out(R1, said("", reasoning="I recall"))
    assert prompt.endswith("<|Assistant|><think>\nI recall")
    assert form.is_reasoning


def test_reasoning_that_a_template_opens_or_closes_by_itself_is_as_the_given_text_needs_it() -> None:
    """Nemotron opens it before any turn of the assistant, DeepSeek V3 closes it where nobody asks for it."""
    opening = "{% for m in messages %}{{ '<A><think>\n' if m.role == 'assistant' else '<U>' }}{{ m.content }}"
    prompt, form = laid_out(f"{opening}{{% endfor %}}{{# </think> #}}", said("It"))
    assert prompt == "<U>Best book?<A><think>\n\n</think>\n\nIt"
    assert not form.is_reasoning
    for closed in ("<think></think>", "</think>"):
        source = (
            "<U>{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
        )
        prompt, form = laid_out(f"{source}<A>{closed}", said("", reasoning="I recall"))
        assert prompt == "<U>Best book?<A><think>\nI recall"
        assert form.is_reasoning
        assert laid_out(f"{source}<A>{closed}", said("It"))[0] == f"<U>Best book?<A>{closed}It"


def test_tags_that_the_caller_writes_are_not_written_twice() -> None:
    """The text may hold the reasoning itself, open or closed."""
    prompt, form = laid_out(R1, said("<think>\nI recall"))
    assert prompt.endswith("<|Assistant|><think>\nI recall")
    assert form.is_reasoning
    prompt, form = laid_out(R1, said("<think>\nI recall</think>It"))
    assert prompt.endswith("<|Assistant|><think>\nI recall</think>It")
    assert not form.is_reasoning


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        (said("a"), {"continue_final_message": True, "add_generation_prompt": True}),
        (ASKED, {"continue_final_message": True}),
        (said("a", tool_calls=[{"function": {"name": "f"}}]), {"continue_final_message": True}),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    messages: list[dict[str, Any]], given: dict[str, Any]
) -> None:
    """By the name of the field."""
    with pytest.raises(InvalidRequestError) as caught:
        continuation_of(messages, dict(given))
    assert caught.value.param == "continue_final_message"


def test_calls_are_followed_by_a_turn_of_its_own() -> None:
    """A turn that ends with calls is over."""
    assert continuation_of(said("a", tool_calls=[{"function": {"name": "f"}}]), {}) is None


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("template", [GEMMA, MISTRAL])
def test_a_system_turn_that_the_template_refuses_joins_the_users_next(template: str) -> None:
    """Gemma, Mistral: as other servers do, also where the answer goes on with a given text."""
    plain = [{"role": "user", "content": "Be brief.\n\nBest book?"}]
    assert laid_out(template, [SYSTEM, *ASKED]) == laid_out(template, plain)
    begun = {"role": "assistant", "content": "The"}
    assert laid_out(template, [SYSTEM, *ASKED, begun]) == laid_out(template, [*plain, begun])


def test_only_the_system_turns_that_are_refused_are_moved() -> None:
    """Newer templates take the first one; the rest goes where it stands."""
    turns = [SYSTEM, *ASKED, {"role": "assistant", "content": "Emma"}, SYSTEM, *ASKED]
    prompt, _ = laid_out(QWEN3, turns)
    assert prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nBest book?<|im_end|>"
    )
    assert "<|im_start|>user\nBe brief.\n\nBest book?<|im_end|>" in prompt
    prompt, _ = laid_out(GEMMA, [*ASKED, {"role": "assistant", "content": "Emma"}, SYSTEM])
    assert "system" in prompt  # it is taken there, so nothing is moved


def test_what_a_template_refuses_in_any_form_is_refused_in_its_own_words() -> None:
    """The error of the conversation as it was given."""
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        laid_out(MISTRAL, [{"role": "assistant", "content": "Emma"}, *ASKED])


BOOK = {"role": "assistant", "content": "Emma"}


def test_turns_of_one_role_are_one_where_a_template_wants_them_to_alternate() -> None:
    """D10: questions and answers in a row, as clients send them after one that failed, become one turn."""
    asked = {"role": "user", "content": "Best book?\n\nBest book?"}
    assert laid_out(MISTRAL, [SYSTEM, *ASKED, *ASKED]) == laid_out(MISTRAL, [SYSTEM, asked])
    answered = {"role": "assistant", "content": "Emma\n\nEmma"}
    once, twice = [*ASKED, answered, *ASKED], [*ASKED, BOOK, BOOK, *ASKED]
    assert laid_out(MISTRAL, twice) == laid_out(MISTRAL, once)
    prompt, _ = laid_out(CHATML, twice)
    assert prompt.count("Emma<|im_end|>") == 2  # it takes them as they are, so they stay


RESULTS = (
    "{# <tool_call> of tools #}{% set ns = namespace(num=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.num % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.num = ns.num + 1 %}{% endif %}"
    "{% if m.content is string %}[{{ m.role }}]{{ m.content }}"
    "{% else %}[{{ m.role }}]{{ m.content | map(attribute='type') | join(',') }}{% endif %}{% endfor %}"
)


def test_what_a_user_says_behind_a_result_stands_in_it_where_turns_alternate() -> None:
    """D10: agents send the results of calls and the user's next words together."""
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    prompt, _ = laid_out(RESULTS, [*called, result, {"role": "user", "content": "Go on"}])
    assert prompt == "[user]Best book?[assistant][tool]sunny\n\nGo on"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    prompt, _ = laid_out(RESULTS, [*called, result, picture])
    assert prompt == "[user]Best book?[assistant][tool]text,image_url"
