"""Documents in order for a query: in front of a runtime that plays a reranker, and the engine's runner."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from encoding_runtime import ENCODER_INFO, RERANKER_INFO, EncodingRuntime, score_of
from stoker.backends.fake.encoder import N_EMBD, load, vector_of
from stoker.backends.fake.vocabulary import BOS, EOS, FakeVocabulary
from stoker.cli.app import app
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.oneshot import OneShotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import ContextLengthError, InvalidRequestError, RequestTimeoutError, UnsupportedError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Failed, Finished, StateReady
from stoker.ipc.model import ModelSpec, Policy
from stoker.ipc.request import GenerateRequest, Priority, Sampling, StateOutput
from stoker.runtime import Runtime
from stoker.tasks.backpressure import MAX_IN_FLIGHT
from stoker.tasks.rerank import rank_documents, require_reranking

QUERY = "who waits?"
DOCUMENTS = [f"document {at}" for at in range(12)]
BEST = sorted(range(len(DOCUMENTS)), key=lambda at: -score_of(QUERY, DOCUMENTS[at]))


@pytest.fixture
def runtime():
    """A runtime with one reranker."""
    runtime = EncodingRuntime()
    runtime.info = RERANKER_INFO
    return runtime


@pytest.fixture
def reranking(runtime):
    """What is tested."""
    return partial(rank_documents, runtime)


# ---------------------------------------------------------------- in front


async def test_documents_come_best_first_with_the_models_own_scores(reranking, runtime):
    """SPEC K4: raw scores, no sigmoid; every document once, with the tokens of all pairs counted."""
    found = await reranking(QUERY, DOCUMENTS, priority=Priority.BACKGROUND)
    assert [each.index for each in found.results] == BEST
    for each in found.results:
        assert each.score == score_of(QUERY, DOCUMENTS[each.index])
    pairs = [FakeVocabulary().pair(QUERY, document) for document in DOCUMENTS]
    assert (found.model, found.usage.prompt_tokens) == ("reranker", sum(map(len, pairs)))
    assert {request.priority for request in runtime.requests} == {Priority.BACKGROUND}
    assert {request.state_output for request in runtime.requests} == {StateOutput.SCORE}
    assert (await reranking(QUERY, [])).results == []


async def test_only_the_best_are_told_of_and_equal_ones_keep_their_order(reranking, runtime):
    """SPEC K4: all are scored, `top_n` are told of; what is equal stays as it was given."""
    found = await reranking(QUERY, DOCUMENTS, top_n=3)
    assert [each.index for each in found.results] == BEST[:3]
    assert len(runtime.requests) == len(DOCUMENTS)
    assert len((await reranking(QUERY, DOCUMENTS, top_n=99)).results) == len(DOCUMENTS)
    runtime.vector = np.ones(N_EMBD, "<f4").tobytes()
    assert [each.index for each in (await reranking(QUERY, DOCUMENTS)).results] == [*range(12)]
    with pytest.raises(InvalidRequestError) as refused:
        await reranking(QUERY, DOCUMENTS, top_n=0)
    assert refused.value.param == "top_n"


async def test_another_output_of_the_classifier_can_be_the_score(reranking):
    """SPEC K4: the first as llama.cpp has it, or the one asked for; what there is not is refused."""
    vectors = [vector_of(FakeVocabulary().pair(QUERY, document)) for document in DOCUMENTS]
    found = await reranking(QUERY, DOCUMENTS, output=1)
    assert [each.score for each in found.results] == sorted((float(v[1]) for v in vectors), reverse=True)
    assert [each.index for each in found.results] != BEST
    for output in (-1, N_EMBD):
        with pytest.raises(InvalidRequestError, match=f"has {N_EMBD}") as refused:
            await reranking(QUERY, DOCUMENTS[:1], output=output)
        assert refused.value.param == "output"


async def test_only_so_many_documents_are_under_way_at_once(reranking, runtime):
    """SPEC Q11: a long list does not fill the line."""
    found = await reranking(QUERY, ["x"] * (2 * MAX_IN_FLIGHT))
    assert len(found.results) == 2 * MAX_IN_FLIGHT
    assert runtime.most_live == MAX_IN_FLIGHT


async def test_the_deadline_is_of_all_documents_together(reranking, runtime, monkeypatch):
    """SPEC Q1: those that begin late have what is left of it, or end."""
    now_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])

    def later():
        now_s[0] += 1.0

    runtime.before = later
    with pytest.raises(RequestTimeoutError):
        await reranking(QUERY, ["x"] * (2 * MAX_IN_FLIGHT), timeout_s=20.0)
    assert runtime.num_live == 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_class": "decoder"}, "is a decoder model"),
        ({"model_class": "encoder-decoder"}, "is an encoder-decoder model"),
        ({"model_class": "recurrent"}, "is a recurrent model"),
        ({"pooling": "mean"}, "encoder without a classifier"),
    ],
)
def test_what_is_no_reranker_is_refused_with_the_reason(fields, why):
    """SPEC K4: a typed error before anything is loaded; of an unknown class the engine decides."""
    with pytest.raises(UnsupportedError, match=why):
        require_reranking(msgspec.structs.replace(RERANKER_INFO, **fields))
    require_reranking(RERANKER_INFO)
    require_reranking(msgspec.structs.replace(ENCODER_INFO, model_class="", pooling=""))


def test_a_document_goes_with_a_score_and_with_text():
    """SPEC S3: a request that makes no sense is never made."""
    score = {"max_tokens": 0, "state_output": StateOutput.SCORE}
    for prompt, fields in (("q", score), ("q", {"document": "d"}), ((1, 2), score | {"document": "d"})):
        with pytest.raises(InvalidRequestError):
            GenerateRequest(prompt=prompt, **fields)


# ---------------------------------------------------------------- in the engine


def resident_of(**spec):
    """A reranker in memory, its encoder, and the table of its requests."""
    fields = {"id": "r", "path": "fake:encoder=1,pooling=rank", "policy": Policy.THROUGHPUT} | spec
    spec = ModelSpec(**fields)
    encoder = load(spec)
    jobs = JobTable()
    runner = OneShotRunner(spec, encoder, StepTimer(Stopwatch(10.0)), jobs)
    runner._cost.learn(64, 1e-4)  # before that, its calls are small
    return runner, encoder, jobs


def enter(runner, name, document, **fields):
    """A pair arrives."""
    wanted = {"model": "r", "max_tokens": 0, "state_output": StateOutput.SCORE}
    wanted |= {"sampling": Sampling(temperature=0)} | fields
    request = GenerateRequest(prompt=QUERY, document=document, **wanted)
    runner.accept(prepare(Submit(request_id=name, request=request), runner.prep, 0.0), 0.0)


def test_pairs_of_several_requests_are_scored_in_one_call():
    """SPEC K4, Q9: each gets its own score, then one ending; people before jobs."""
    runner, encoder, jobs = resident_of(n_batch=64)
    enter(runner, "job", "one", priority=Priority.BACKGROUND)
    enter(runner, "a", "two")
    enter(runner, "b", "three")
    for now in (0.0, 1.0):
        runner.schedule(now)
        runner.step(now)
    ready = [event for event in jobs.events if isinstance(event, StateReady)]
    assert [event.request_id for event in ready] == ["a", "b", "job"]
    assert encoder.calls == [3]
    for event, document in zip(ready, ("two", "three", "one"), strict=True):
        (tensor,) = event.tensors
        assert (tensor.name, tensor.shape) == ("scores", (1,))
        assert np.frombuffer(tensor.data, "<f4") == np.float32(score_of(QUERY, document))
    assert [e.request_id for e in jobs.events if isinstance(e, Finished)] == ["a", "b", "job"]


def test_a_late_pair_and_a_long_one_end_with_their_reason():
    """SPEC Q1, K7: as texts to embed do; the fault is named by the field that callers know."""
    runner, _, jobs = resident_of()
    enter(runner, "late", "one", timeout_s=1.0)
    jobs.expire(2.0)
    (failed,) = [event for event in jobs.events if isinstance(event, Failed)]
    assert failed.error.code == "request_timeout"
    with pytest.raises(ContextLengthError) as refused:
        enter(runner, "long", "x" * 600)
    assert refused.value.param == "documents"


def test_control_tokens_in_a_document_are_text():
    """SPEC S8: a document cannot end the query or begin another pair."""
    tokens = FakeVocabulary().pair("q", "</s><s>d")
    assert tokens == [BOS, *b"q", EOS, *b"</s><s>d"]


@pytest.mark.parametrize("path", ["fake:", "fake:encoder=1"])
async def test_the_engine_refuses_a_pair_for_any_other_model(tmp_path, path):
    """SPEC K4: where nobody in front knew the class, what is loaded says so."""
    async with Runtime(path, isolation="thread", cache_dir=tmp_path, states_dir=tmp_path) as runtime:
        with pytest.raises(UnsupportedError):
            await rank_documents(runtime, QUERY, DOCUMENTS)
        request = GenerateRequest(prompt=QUERY, document="d", max_tokens=0, state_output=StateOutput.SCORE)
        with pytest.raises(UnsupportedError, match="no reranker"):
            async for _ in runtime.stream(request):
                pass


# ---------------------------------------------------------------- commands


@pytest.fixture
def of_nobody(tmp_path, monkeypatch):
    """Folders of nobody's home."""
    for name in ("MODELS_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"STOKER_{name}", str(tmp_path / name))


def invoke(*arguments, runtime, stdin=None):
    """One call of the program."""
    return CliRunner().invoke(app, list(arguments), obj=lambda settings: runtime, input=stdin)


@pytest.mark.usefixtures("of_nobody")
def test_the_command_prints_the_best_first(runtime):
    """SPEC I1: `stoker rerank QUERY DOC...`, or a document a line; --json as the server answers."""
    given = ["one", "two", "three"]
    expected = sorted(given, key=lambda document: -score_of(QUERY, document))
    lines = "".join(f"{score_of(QUERY, document):.4f}\t{document}\n" for document in expected)
    assert invoke("rerank", QUERY, *given, runtime=runtime).stdout == lines
    assert invoke("rerank", QUERY, runtime=runtime, stdin="one\n\ntwo\nthree\n").stdout == lines
    answer = json.loads(invoke("rerank", QUERY, *given, "--json", "--top-n", "1", runtime=runtime).stdout)
    (result,) = answer["results"]
    assert result["document"] == {"text": expected[0]}
    assert result["relevance_score"] == score_of(QUERY, expected[0])
    nothing = invoke("rerank", QUERY, runtime=runtime, stdin="\n")
    assert (nothing.exit_code, "no documents" in nothing.stderr) == (2, True)


@pytest.mark.usefixtures("of_nobody")
def test_the_command_prints_a_vector_a_line(runtime):
    """SPEC I1: `stoker embed TEXT...`, or a text a line; --json as the server answers."""
    runtime.info = ENCODER_INFO
    given = ["one", "two"]
    printed = invoke("embed", *given, runtime=runtime).stdout
    for line, text in zip(printed.splitlines(), given, strict=True):
        vector = vector_of(EncodingRuntime.tokens(text))
        assert np.allclose(json.loads(line), vector / np.linalg.norm(vector), atol=1e-6)
    assert invoke("embed", runtime=runtime, stdin="one\ntwo\n").stdout == printed
    answer = json.loads(invoke("embed", *given, "--json", runtime=runtime).stdout)
    assert [entry["embedding"] for entry in answer["data"]] == [*map(json.loads, printed.splitlines())]
    runtime.info = RERANKER_INFO
    refused = invoke("embed", "one", runtime=runtime)
    assert (refused.exit_code, "is a reranker" in refused.stderr) == (2, True)
