"""Vectors of texts for callers (SPEC K2): many texts at once, normalised, cut to fewer numbers.

Owns which model embeds and which generates. A text travels as any request does, so classes, deadlines, bounds
and restarts hold for it; how many are under way at once is `tensor_call`'s, computing the engine's.
"""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec

from stoker.client.requests.group import KnownAs
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import ModelClass, ModelInfo, Pooling
from stoker.ipc.request import GenerateRequest, StateOutput
from stoker.ipc.status import CallKind
from stoker.ipc.usage import Tensor, Usage
from stoker.tasks.fields import CallKeywords, Prompt, checked_prompt, request_of
from stoker.tasks.tensor_call import TaskRuntime, answers_of

__all__ = ["EmbedKeywords", "TextEmbeddings", "embed_texts", "require_embedding"]

_VECTOR = "embedding"


class EmbedKeywords(CallKeywords, total=False):
    """Those of a call, and what becomes of the vectors."""

    normalize: bool
    dimensions: int | None


class TextEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of texts, in their order: each little-endian float32."""

    model: str
    vectors: list[bytes]
    usage: Usage

    def floats(self) -> list[list[float]]:
        """The same as numbers."""
        return [floats_of(vector).tolist() for vector in self.vectors]


async def embed_texts(
    runtime: TaskRuntime,
    texts: Prompt | Sequence[Prompt],
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    **fields: Unpack[CallKeywords],
) -> TextEmbeddings:
    """The vectors of one text or of several.

    Args:
        runtime: that has the model.
        texts: text or token ids, or a sequence of them.
        normalize: scale each to length 1; one of zeros stays as it is.
        dimensions: keep so many numbers of each, the first ones; None: all.
        fields: of `GenerateRequest` and `KnownAs`, by name; `model` is a served encoder, `timeout_s` is
            for all texts together.

    Raises:
        UnsupportedError: the model gives no vectors of texts.
        InvalidRequestError: a field or a token id is out of range.
        ContextLengthError: a text is longer than the model takes.
        RequestCancelledError: the call was cancelled by its id.
        StokerError: a request failed; the others are cancelled.
    """
    info = runtime.resolve(fields.get("model"))
    require_embedding(info)
    _check_dimensions(dimensions, info)
    wanted: dict[str, Any] = {"temperature": 0.0, **fields, "model": info.id}
    known_as = KnownAs.taken_from(wanted)
    requests = [_request(text, wanted) for text in _several(texts)]
    found = await answers_of(runtime, CallKind.EMBED, requests, known_as)
    vectors = [_vector_of(ready.tensors[0], info) for ready, _ in found]
    return TextEmbeddings(
        model=info.id,
        vectors=[_finished(vector, dimensions, normalize=normalize) for vector in vectors],
        usage=Usage(prompt_tokens=sum(end.usage.prompt_tokens for _, end in found)),
    )


# ---------------------------------------------------------------- which model does what

_NO_VECTORS = "no encoder: this model does not support embeddings"
ASK_STATE = '; "kind": "state" gives the state that a prompt leaves'


def require_embedding(info: ModelInfo, hint: str = ASK_STATE) -> None:
    """Raises UnsupportedError where a model gives no vectors of texts (SPEC K2, K3), as far as is known.

    Args:
        info: of the model.
        hint: what the caller may ask a decoder for in place of them, if it gives that.
    """
    what = f"{info.id} is {info.class_text}"
    if info.model_class == ModelClass.ENCODER_DECODER:
        raise UnsupportedError(
            f"{what}: what its encoder makes of a text is for its decoder to read, and no vector of the text",
            param="model",
        )
    if info.model_class not in {ModelClass.ENCODER, ""}:
        raise UnsupportedError(f"{what}, {_NO_VECTORS}{hint if info.gives_states else ''}", param="model")
    if info.pooling == Pooling.RANK:
        raise UnsupportedError(f"{info.id} is a reranker: it scores, it gives no vectors", param="model")


# ---------------------------------------------------------------- texts and vectors


def floats_of(vector: bytes) -> array.array[float]:
    """The numbers of a little-endian float32 vector."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _several(texts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or (texts and isinstance(texts[0], int)):
        return [checked_prompt(texts)]  # one text, one list of token ids, or what is refused
    return [checked_prompt(text) for text in texts]


def _request(text: Prompt, fields: Mapping[str, Any]) -> GenerateRequest:
    request = request_of(text, fields)
    return msgspec.structs.replace(request, max_tokens=0, n=1, state_output=StateOutput.EMBED)


def _vector_of(tensor: Tensor, info: ModelInfo) -> bytes:
    if tensor.name != _VECTOR:  # a model whose class was not known before it was loaded
        hint = ASK_STATE if info.gives_states else ""
        raise UnsupportedError(f"{info.id} is {_NO_VECTORS}{hint}", param="model")
    return tensor.data


def _check_dimensions(dimensions: int | None, info: ModelInfo) -> None:
    most = info.n_embd or sys.maxsize
    if dimensions is not None and not 1 <= dimensions <= most:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; vectors of {info.id} have {info.n_embd} numbers", param="dimensions"
        )


def _finished(vector: bytes, dimensions: int | None, *, normalize: bool) -> bytes:
    """The vector as the caller wants it; scaled last, so that a cut one has length 1 as well."""
    numbers = floats_of(vector)[:dimensions]
    length = math.hypot(*numbers) if normalize else 0.0
    if length:
        numbers = array.array("f", (number / length for number in numbers))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
