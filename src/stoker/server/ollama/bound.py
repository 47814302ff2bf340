"""`num_ctx` and `truncate`: what a prompt may have beside its answer, and how one that has more is cut.

A bound holds for its own request; the model stays as it is loaded. Nothing is cut unless `truncate` is true:
then a conversation loses its oldest exchanges, system turns aside, and a prompt its beginning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stoker.errors import ContextLengthError
from stoker.ipc.request import MAX_TOKENS

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.request import GenerateRequest
    from stoker.runtime import Runtime
    from stoker.server.ollama.options import OllamaFields, OllamaOptions
    from stoker.server.openai.chat import ChatTurn

T = TypeVar("T")

_MOST_SHARE = 2  # an answer gets no more than half of the context while a prompt is cut
_USUAL_SHARE = 4  # and a quarter where it does not say what it needs


@dataclass(frozen=True, slots=True)
class Bound:
    """What prompt and answer may have together.

    Attributes:
        n_ctx: tokens.
        is_own: it is less than the model's.
        cuts: a prompt that is too long is cut, not refused.
        param: names the prompt in errors.
        max_tokens: that the answer asks for; None: as set.
    """

    n_ctx: int
    is_own: bool
    cuts: bool
    param: str
    max_tokens: int | None

    @classmethod
    def of(cls, body: OllamaFields, options: OllamaOptions, info: ModelInfo, param: str) -> Bound:
        """That of a request."""
        served = info.n_ctx or MAX_TOKENS  # a header may not say
        n_ctx = min(options.num_ctx or served, served)
        limit = options.token_limit(info)
        return cls(n_ctx, n_ctx < served, body.truncate is True, param, limit)

    @property
    def most_prompt(self) -> int:
        """Tokens that a prompt is cut to, so that its answer has room."""
        room = min(self.max_tokens or self.n_ctx // _USUAL_SHARE, self.n_ctx // _MOST_SHARE)
        return self.n_ctx - max(1, room)

    def check(self, num_tokens: int) -> None:
        """Raises ContextLengthError, with both numbers, for a prompt that leaves no place for a token."""
        if num_tokens >= self.n_ctx:
            what = "the prompt without its answer"
            error = ContextLengthError.over(what, num_tokens, self.n_ctx, param=self.param)
            raise error.bounded_by("options.num_ctx") if self.is_own else error

    def applied(self, request: GenerateRequest, num_tokens: int) -> GenerateRequest:
        """The request with no more tokens of an answer than the bound leaves it."""
        left = self.n_ctx - num_tokens
        if not self.is_own or (request.max_tokens is not None and request.max_tokens <= left):
            return request
        return msgspec.structs.replace(request, max_tokens=left)


async def turn_within(
    runtime: Runtime,
    bound: Bound,
    body: T,
    make: Callable[[T], Awaitable[ChatTurn]],
    shorten: Callable[[int, Callable[[T], Awaitable[int]]], Awaitable[T]],
) -> ChatTurn:
    """The turn that a body asks for, within its bound.

    Args:
        runtime: counts tokens.
        bound: of the request.
        body: of the request.
        make: a turn of a body.
        shorten: a shorter body; gets the tokens that there are, and what counts those of a body.

    Raises:
        ContextLengthError: the prompt is too long, and may not be cut or cannot be.
        StokerError: what `make` raises.
    """

    async def counted(given: T) -> int:
        return await runtime.count_tokens((await make(given)).request)

    turn = await make(body)
    if not (bound.is_own or bound.cuts):
        return turn
    num_tokens = await runtime.count_tokens(turn.request)
    if bound.cuts and num_tokens >= bound.n_ctx:
        turn = await make(await shorten(num_tokens, counted))
        num_tokens = await runtime.count_tokens(turn.request)
    bound.check(num_tokens)
    turn.call.requests = [bound.applied(turn.request, num_tokens)]
    return turn


async def first_that_fits(choices: Sequence[T], fits: Callable[[T], Awaitable[bool]]) -> T:
    """The first of `choices` that fits, each being shorter than the one before it; the last if none does."""
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(choices[middle]):
            high = middle
        else:
            low = middle + 1
    return choices[low]
