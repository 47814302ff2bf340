"""Documents in the order of what they have to say to a query (SPEC K4), by a cross-encoder.

Owns which model scores and what a score is. A pair of query and document travels as any request does, so
classes, deadlines, bounds and restarts hold for it; computing is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec

from stoker.client.requests.group import KnownAs
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import ModelClass, ModelInfo, Pooling
from stoker.ipc.request import GenerateRequest, StateOutput
from stoker.ipc.status import CallKind
from stoker.ipc.usage import Usage
from stoker.tasks.embed import floats_of
from stoker.tasks.fields import CallKeywords, request_of, texts_of
from stoker.tasks.form import Several
from stoker.tasks.tensor_call import TaskRuntime, answers_of

__all__ = ["RankedDocument", "Ranking", "RerankKeywords", "rank_documents", "require_reranking"]


class RerankKeywords(CallKeywords, total=False):
    """Those of a call, and what is said of the documents."""

    top_n: int | None
    output: int | None


class RankedDocument(msgspec.Struct, frozen=True):
    """One document's place.

    Attributes:
        index: of the document as it was given.
        score: an output of the model's classifier, as it is: any number, the higher the better. Where a
            model was trained with a sigmoid, 1 / (1 + exp(-score)) is its probability; callers apply that.
    """

    index: int
    score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents by their score, the best first; equal ones as they were given."""

    model: str
    results: list[RankedDocument]
    usage: Usage


async def rank_documents(
    runtime: TaskRuntime,
    query: str,
    documents: Several[str],
    *,
    top_n: int | None = None,
    output: int | None = None,
    **fields: Unpack[CallKeywords],
) -> Ranking:
    """The documents by what they have to say to the query.

    Args:
        runtime: that has the model.
        query: what is asked.
        documents: texts; each is scored alone, whatever stands beside it.
        top_n: tell of so many only, the best ones; None: of all.
        output: which output of the classifier is the score, from 0; None: the only one, the one that the
            model's labels call relevant, or what the setting `rerank_output` says.
        fields: of `GenerateRequest` and `KnownAs`, by name; `model` is a served reranker, `timeout_s` is
            for all documents together.

    Raises:
        UnsupportedError: the model scores nothing.
        InvalidRequestError: a field is out of range, or of several outputs nothing says which is the score.
        ContextLengthError: a document with the query is longer than the model takes.
        RequestCancelledError: the call was cancelled by its id.
        StokerError: a request failed; the others are cancelled.
    """
    info = runtime.resolve(fields.get("model"))
    require_reranking(info)
    if top_n is not None and top_n < 1:
        raise InvalidRequestError(f"top_n is {top_n}; it is 1 or more", param="top_n")
    output = info.score_output if output is None else output
    if output is None:
        text = (
            f"the classifier of {info.id} has several outputs and its file does not say which is the"
            " score: choose one with output (--output N), from 0 (of two often 1), or serve it with"
            " rerank_output (stoker serve --rerank-output N)"
        )
        raise InvalidRequestError(text, param="output")
    wanted: dict[str, Any] = {"temperature": 0.0, **fields, "model": info.id}
    known_as = KnownAs.taken_from(wanted)
    requests = [_request(query, each, wanted) for each in texts_of(documents, "documents")]
    found = await answers_of(runtime, CallKind.RERANK, requests, known_as)
    scored = [
        RankedDocument(at, _score(floats_of(ready.tensors[0].data), output, info.id))
        for at, (ready, _) in enumerate(found)
    ]
    return Ranking(
        model=info.id,
        results=sorted(scored, key=lambda document: -document.score)[:top_n],
        usage=Usage(prompt_tokens=sum(end.usage.prompt_tokens for _, end in found)),
    )


def require_reranking(info: ModelInfo) -> None:
    """Raises UnsupportedError where a model scores no pairs (SPEC K4), as far as is known before its load."""
    what = f"{info.id} is {info.class_text}"
    if info.model_class not in {ModelClass.ENCODER, ""}:
        raise UnsupportedError(
            f"{what}: documents are scored by an encoder that was trained to", param="model"
        )
    if info.model_class == ModelClass.ENCODER and info.pooling != Pooling.RANK:
        raise UnsupportedError(
            f"{info.id} is an encoder without a classifier (pooling {info.pooling or 'unknown'}):"
            " it gives vectors of texts and scores none",
            param="model",
        )


def _score(outputs: Sequence[float], output: int, model: str) -> float:
    if not 0 <= output < len(outputs):
        raise InvalidRequestError(
            f"output is {output}; the classifier of {model} has {len(outputs)}, counted from 0",
            param="output",
        )
    return outputs[output]


def _request(query: str, document: str, fields: Mapping[str, Any]) -> GenerateRequest:
    wanted = {"max_tokens": 0, "n": 1, "state_output": StateOutput.SCORE, "document": document}
    return request_of(query, {**fields, **wanted})
