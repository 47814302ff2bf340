"""What a prompt is to an encoder-decoder (SPEC K3): the source that its encoder reads, no part of the answer.

Pure. Which token the answer begins with is the backend's to say; encoding is the backend's as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import ContextLengthError, UnsupportedError

if TYPE_CHECKING:
    from stoker.ipc.request import GenerateRequest


def refuse_unreadable(request: GenerateRequest, model: str) -> None:
    """Raises UnsupportedError where a request asks for what only a prompt that is continued can give."""
    what = f"{model} is an encoder-decoder"
    if request.state_output is not None:
        raise UnsupportedError(
            f"{what}: what its encoder makes of a text is for its decoder to read,"
            " and no state, vector or score of the text",
            param="model",
        )
    if request.prompt_logprobs is not None:
        raise UnsupportedError(
            f"{what}: its prompt is read by the encoder, which gives no probabilities of its tokens",
            param="prompt_logprobs",
        )
    if request.context_shift:
        raise UnsupportedError(
            f"{what}: its answer begins with no prompt that a shifted context could keep",
            param="context_shift",
        )


def check_source(source: list[int], n_ctx: int) -> None:
    """Raises ContextLengthError where a source is longer than the encoder reads at once."""
    if len(source) > n_ctx:
        raise ContextLengthError.over("the prompt without its answer", len(source), n_ctx)
