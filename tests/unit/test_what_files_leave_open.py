"""What a model's file leaves open and a setting may say: its chat template, and which output of it scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker import EngineSettings, Runtime
from stoker.chat.template import ChatTemplate
from stoker.client.models.specs import ModelSource
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.models.chat_templates import CHATML, GEMMA, LLAMA3, PHI3, family_template
from stoker.tasks.rerank import Ranking
from tiny_models import write_bert, write_gemma3, write_llama

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CLASSES = ["irrelevant", "relevant"]


def served(*models: Path, **fields: Any) -> ModelSource:
    """The source of a runtime that serves these."""
    return ModelSource.read(EngineSettings(models=tuple(map(str, models)), **fields))


def running(model: Path, **fields: Any) -> Runtime:
    """A runtime of one tiny model."""
    return Runtime(model, isolation="thread", ctx_size=64, drain_s=0.0, cache_dir=model.parent, **fields)


# ---------------------------------------------------------------- chat templates


@pytest.mark.parametrize(
    ("architecture", "eos_text", "expected"),
    [
        ("gemma3", "<eos>", GEMMA),
        ("llama", "<|im_end|>", CHATML),
        ("qwen2", "<|endoftext|>", CHATML),
        ("llama", "<|eot_id|>", LLAMA3),
        ("phi3", "<|endoftext|>", PHI3),
        ("llama", "</s>", None),
        ("rwkv6", "", None),
    ],
)
def test_a_family_is_told_by_its_name_or_by_what_ends_its_turns(
    architecture: str, eos_text: str, expected: str | None
) -> None:
    """A model of another family gets no template that it has never seen (D15)."""
    assert family_template(architecture, eos_text) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (
            GEMMA,
            (
                "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
                "<start_of_turn>model\nHello<end_of_turn>\n"
                "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
            ),
        ),
        (
            LLAMA3,
            (
                "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (
            PHI3,
            (
                "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n"
                "<|user|>\nBye<|end|>\n<|assistant|>\n"
            ),
        ),
    ],
)
def test_a_familys_template_lays_turns_out_as_its_models_were_trained(template: str, expected: str) -> None:
    """As the families' own files have it (D15)."""
    assert ChatTemplate(template, bos_text="<s>").render(TURNS) == expected


@pytest.mark.long
async def test_a_model_without_a_template_takes_no_conversation_until_it_is_given_one(tmp_path: Path) -> None:
    """The refusal names the setting; with it the same conversation is answered (D15)."""
    model = write_llama(tmp_path / "base.gguf")
    async with running(model) as runtime:
        assert not runtime.resolve("default").takes_conversations
        with pytest.raises(UnsupportedError, match=r"base is .* without .*template: .*--chat-template FILE"):
            await runtime.ask([{"role": "user", "content": "Hi"}], max_tokens=2)
        assert (await runtime.ask("Hi", max_tokens=2)).usage.completion_tokens  # a text is a prompt
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)
    async with running(model, chat_template=(str(template),)) as runtime:
        assert runtime.resolve("default").chat_template == PLAIN_TEMPLATE  # as loaded too
        assert (await runtime.prepare_chat(TURNS)).prompt == "".join(
            f"{turn['role']}: {turn['content']}\n" for turn in TURNS
        )
        assert (await runtime.ask(TURNS, max_tokens=2)).usage.completion_tokens


def test_a_template_of_the_settings_is_for_models_without_one_or_for_one_by_name(tmp_path: Path) -> None:
    """What a family brings is its model's own (D15)."""
    base, gemma = write_llama(tmp_path / "base.gguf"), write_gemma3(tmp_path / "gemma.gguf")
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)

    def templates(*given: str) -> list[str | None]:
        source = served(base, gemma, chat_template=given)
        assert [found.spec.chat_template for found in source.served] == [
            found.info.chat_template for found in source.served
        ]
        return [found.info.chat_template for found in source.served]

    assert templates() == [None, GEMMA]
    assert templates(str(template)) == [PLAIN_TEMPLATE, GEMMA]
    assert templates(f"gemma={template}") == [None, PLAIN_TEMPLATE]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("gone.jinja",), "chat_template: gone.jinja: .*No such file"),
        (("empty.jinja",), "chat_template: empty.jinja is empty"),
        (("other=plain.jinja",), "chat_template: no model 'other' is served; there are: base"),
        (("plain.jinja", "plain.jinja"), "chat_template: two are given for every model"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], message: str
) -> None:
    """With the setting's name and what is wrong (D15)."""
    monkeypatch.chdir(tmp_path)
    Path("plain.jinja").write_text(PLAIN_TEMPLATE)
    Path("empty.jinja").write_text("\n")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        served(write_llama(tmp_path / "base.gguf"), chat_template=given)
    assert caught.value.param == "chat_template"


# ---------------------------------------------------------------- rerankers


@pytest.mark.parametrize(
    ("labels", "given", "expected"),
    [
        ([""], (), 0),
        (["0", "1"], (), None),
        (["LABEL_0", "LABEL_1"], ("1",), 1),
        (CLASSES, (), 1),
        (["Yes", "No"], (), 0),
        (["yes", "relevant"], (), None),
        (CLASSES, ("0",), 1),
        (CLASSES, ("ranker=0",), 0),
        (["0", "1"], ("1", "ranker=0"), 0),
    ],
)
def test_the_score_is_the_only_output_the_relevant_one_or_the_chosen_one(
    tmp_path: Path, labels: list[str], given: tuple[str, ...], expected: int | None
) -> None:
    """Labels that say nothing choose nothing; a setting is for rerankers without them, or for one (D14)."""
    model = write_bert(tmp_path / "ranker.gguf", pooling=4, labels=labels)
    (found,) = served(model, rerank_output=given).served
    assert found.spec.score_output == found.info.score_output == expected


SAME = 1e-4
"""Scores of the same texts differ less in calls of other company; those of two outputs by much more."""


def scores(ranking: Ranking) -> list[float]:
    """Of each document, in the order they were given."""
    return [found.score for found in sorted(ranking.results, key=lambda found: found.index)]


@pytest.mark.long
async def test_a_reranker_with_two_outputs_ranks_nothing_until_one_is_chosen(tmp_path: Path) -> None:
    """Never by the first one without a word; by the call, by the setting, or by its labels (D14)."""
    documents = ["the sun", "a bee", "the king"]
    model = write_bert(tmp_path / "ranker.gguf", pooling=4, labels=["0", "1"])
    async with running(model) as runtime:
        with pytest.raises(InvalidRequestError, match=r"several outputs .* rerank_output") as caught:
            await runtime.rerank("the queen", documents)
        assert caught.value.param == "output"
        chosen = [await runtime.rerank("the queen", documents, output=at) for at in (0, 1)]
        assert scores(chosen[0]) != pytest.approx(scores(chosen[1]), abs=SAME)
    async with running(model, rerank_output=("1",)) as runtime:
        assert scores(await runtime.rerank("the queen", documents)) == pytest.approx(
            scores(chosen[1]), abs=SAME
        )
    labelled = write_bert(tmp_path / "labelled" / "ranker.gguf", pooling=4, labels=CLASSES)
    async with running(labelled) as runtime:
        assert scores(await runtime.rerank("the queen", documents)) == pytest.approx(
            scores(chosen[1]), abs=SAME
        )


@pytest.mark.parametrize("given", ["-1", "one", "1.5", "ranker=", "²"])
def test_an_output_that_is_no_number_is_refused_at_the_start(tmp_path: Path, given: str) -> None:
    """With the setting's name (D14)."""
    model = write_bert(tmp_path / "ranker.gguf", pooling=4, labels=["0", "1"])
    with pytest.raises(InvalidRequestError, match="rerank_output") as caught:
        served(model, rerank_output=(given,))
    assert caught.value.param == "rerank_output"
