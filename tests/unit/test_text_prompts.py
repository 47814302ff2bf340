"""A prompt's text as tokens: the BOS of conversations, family by family, and of completions."""

from __future__ import annotations

import pytest

from stoker.backends.fake.vocabulary import BOS, FakeVocabulary
from stoker.chat.template import ChatTemplate
from stoker.engine.jobs.prompts import text_tokens

TURNS = [{"role": "user", "content": "hi"}]
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)


class _NoBos(FakeVocabulary):
    """As Qwen's and SmolLM2's: it has a BOS and puts it nowhere."""

    @property
    def added_bos(self) -> int | None:
        return None


@pytest.mark.parametrize("source", [LLAMA3, CHATML, GEMMA, MISTRAL])
def test_a_conversation_begins_with_one_bos(source: str) -> None:
    """As llama-server: whether or not the template writes it."""
    text = ChatTemplate(source, bos_text="<s>").render(TURNS)
    tokens = text_tokens(text, FakeVocabulary(), is_chat=True)
    assert (tokens[0], tokens.count(BOS)) == (BOS, 1)
    assert tokens[1:] == FakeVocabulary().tokenize(
        text.removeprefix("<s>"), add_special=False, parse_special=True
    )


@pytest.mark.parametrize(("source", "num_bos"), [(CHATML, 0), (GEMMA, 1)])
def test_a_vocabulary_that_adds_none_leaves_it_to_the_template(source: str, num_bos: int) -> None:
    """Qwen, SmolLM2: only what the template writes."""
    text = ChatTemplate(source, bos_text="<s>").render(TURNS)
    assert text_tokens(text, _NoBos(), is_chat=True).count(BOS) == num_bos


def test_a_conversation_that_goes_on_from_a_state_has_no_bos_within() -> None:
    """SPEC K5: the state has read one."""
    assert text_tokens("hi", FakeVocabulary(), is_chat=True, has_state=True) == [*b"hi"]


def test_a_completion_gets_what_the_vocabulary_adds() -> None:
    """A text that no template wrote."""
    assert text_tokens("hi", FakeVocabulary(), is_chat=False) == [BOS, *b"hi"]
