"""What was delivered of one request, merged, so that it can be shown again and computed on.

The only place that keeps a request's tokens in the client; bounded by the request's own tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.events import Delta, Failed, Finished, PromptEcho, RequestEvent, StateReady

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.ipc.request import FinishReason
    from stoker.ipc.usage import TokenLogprob

Shown = PromptEcho | StateReady | Delta | Finished | Failed
"""What stays true after it was shown; places in a queue and pauses do not."""


class MergedDelta:
    """Deltas of one choice as one. `mirostat_mu` is the sampler's state after the last token."""

    __slots__ = ("finish_reason", "logprobs", "mirostat_mu", "stop_text", "texts", "token_ids")

    def __init__(self, deltas: Iterable[Delta] = ()) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_text: str | None = None
        self.mirostat_mu: float | None = None
        for delta in deltas:
            self.add(delta)

    def add(self, delta: Delta) -> None:
        """Another one, which comes after those before."""
        if delta.text:
            self.texts.append(delta.text)
        if delta.token_ids:
            self.token_ids += delta.token_ids
            self.mirostat_mu = delta.mirostat_mu
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_text = delta.stop_text

    def whole(self, request_id: str, index: int) -> Delta:
        """All of them; later ones do not change it."""
        self.texts = ["".join(self.texts)]  # what grew piece by piece need not be joined again
        return Delta(
            request_id=request_id,
            index=index,
            text=self.texts[0],
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_text=self.stop_text,
            mirostat_mu=self.mirostat_mu,
        )


class Transcript:
    """Everything delivered of one request so far.

    Args:
        request_id: of the request.
        shown: what a former program had shown of it.
    """

    __slots__ = ("_before", "_choices", "_end", "_request_id")

    def __init__(self, request_id: str, shown: Iterable[Shown] = ()) -> None:
        self._request_id = request_id
        self._before: list[PromptEcho | StateReady] = []
        self._choices: dict[int, MergedDelta] = {}
        self._end: Finished | Failed | None = None
        for event in shown:
            self.take(event)

    def __repr__(self) -> str:
        return f"<Transcript of {self.num_tokens} tokens, ended={self.is_ended}>"

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices.values())

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event was taken."""
        return self._end is not None

    def token_ids(self, index: int) -> list[int]:
        """Tokens of one choice, as a list of the caller's own."""
        return list(self._choices[index].token_ids) if index in self._choices else []

    def is_finished(self, index: int) -> bool:
        """Whether a choice has ended."""
        return index in self._choices and self._choices[index].finish_reason is not None

    def mirostat_mu(self, index: int) -> float | None:
        """The sampler's state after the last token of a choice."""
        return self._choices[index].mirostat_mu if index in self._choices else None

    def take(self, event: RequestEvent) -> bool:
        """Note an event; False where it repeats what was shown: an echo and a state are there once."""
        match event:
            case Delta():
                self._choices.setdefault(event.index, MergedDelta()).add(event)
            case PromptEcho() | StateReady():
                if any(type(before) is type(event) for before in self._before):
                    return False
                self._before.append(event)
            case Finished() | Failed():
                self._end = event
        return True

    def shown(self) -> list[Shown]:
        """All of it in few events: what comes before the text, one delta a choice, the end."""
        deltas = [choice.whole(self._request_id, index) for index, choice in sorted(self._choices.items())]
        return [*self._before, *deltas, *([self._end] if self._end else [])]
