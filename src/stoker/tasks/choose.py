"""Which of some texts a model finds the likeliest after a prompt (SPEC D5).

Owns what a score, a rank and a probability are. The candidates of a call travel as one request, so classes,
deadlines, bounds and restarts hold for it; how likely each is, is the engine's to compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec

from stoker.client.requests.group import KnownAs
from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass, ModelInfo
from stoker.ipc.request import GenerateRequest, StateOutput
from stoker.ipc.status import CallKind
from stoker.ipc.usage import Usage
from stoker.tasks.embed import floats_of
from stoker.tasks.fields import CallKeywords, Prompt, request_of, texts_of
from stoker.tasks.form import Several
from stoker.tasks.tensor_call import TaskRuntime, answers_of

__all__ = ["Choice", "Choices", "ChooseKeywords", "require_choosing", "score_choices"]


class ChooseKeywords(CallKeywords, total=False):
    """Those of a call, and how its choices are scored."""

    calibrate: bool


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate's place.

    Attributes:
        index: of the candidate as it was given.
        rank: 0 is the best.
        choice: its text.
        score: mean negative log-likelihood of its tokens after the prompt, in nats; calibrated, less the same
            from the initial state. The lower the better; +inf for an empty one.
        probability: softmax of -score over the candidates of this call; 0 for an empty one. It says how the
            scores compare, not how sure the model is.
    """

    index: int
    rank: int
    choice: str
    score: float
    probability: float


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates by their score, the best first; equal ones as they were given."""

    model: str
    results: list[Choice]
    usage: Usage

    @property
    def best(self) -> Choice:
        """The first of them."""
        return self.results[0]


async def score_choices(
    runtime: TaskRuntime,
    prompt: Prompt,
    choices: Several[str],
    *,
    calibrate: bool = False,
    **fields: Unpack[CallKeywords],
) -> Choices:
    """The candidates by how likely they are after the prompt.

    Args:
        runtime: that has the model.
        prompt: text or token ids.
        choices: texts, each tokenised alone and appended to the prompt's tokens as it is.
        calibrate: subtract how likely each is from the initial state: after the model's BOS token alone.
        fields: of `GenerateRequest` and `KnownAs`, by name; `model` is one that generates.

    Raises:
        UnsupportedError: the model predicts no tokens of a prompt.
        InvalidRequestError: a field is out of range, or there are too many choices or none.
        ContextLengthError: the prompt with a choice is longer than the context.
        RequestCancelledError: the call was cancelled by its id.
        StokerError: the request failed.
    """
    choices = texts_of(choices, "choices")
    info = runtime.resolve(fields.get("model"))
    require_choosing(info)
    wanted: dict[str, Any] = {**fields, "model": info.asked_as, "is_calibrated": calibrate}
    known_as = KnownAs.taken_from(wanted)
    requests = [_request(prompt, choices, wanted)]
    ((ready, end),) = await answers_of(runtime, CallKind.CHOOSE, requests, known_as)
    numbers = floats_of(ready.tensors[0].data)
    scores = list(numbers[: len(choices)])
    if calibrate:
        baseline = numbers[len(choices) :]
        scores = [
            score if math.isinf(score) else score - initial
            for score, initial in zip(scores, baseline, strict=True)
        ]
    return Choices(model=info.id, results=ranked(choices, scores), usage=end.usage)


def ranked(choices: Sequence[str], scores: Sequence[float]) -> list[Choice]:
    """Candidates with their places; `scores` are finite or +inf, the lower the better."""
    least = min(scores)
    weights = [0.0 if math.isinf(score) else math.exp(least - score) for score in scores]
    total = math.fsum(weights) or 1.0
    order = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    return [
        Choice(
            index=index,
            rank=rank,
            choice=choices[index],
            score=scores[index],
            probability=weights[index] / total,
        )
        for rank, index in enumerate(order)
    ]


def require_choosing(info: ModelInfo) -> None:
    """Raises UnsupportedError where a model continues no prompt, as far as is known before its load."""
    if info.model_class in {ModelClass.ENCODER, ModelClass.ENCODER_DECODER}:
        raise UnsupportedError(
            f"{info.id} is an {info.model_class} ({info.architecture}): it continues no prompt, so it cannot"
            " tell how likely a choice is after one",
            param="model",
        )


def _request(prompt: Prompt, choices: Sequence[str], fields: Mapping[str, Any]) -> GenerateRequest:
    wanted = {"max_tokens": 0, "n": 1, "state_output": StateOutput.CHOOSE, "candidates": tuple(choices)}
    return request_of(prompt, {"temperature": 0.0, **fields, **wanted})
