"""What the client of one request has been shown, merged, so that another can be shown the same.

Owns only that; it is bounded by the request's own tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.events import Delta, Failed, Finished, PromptEcho, RequestEvent, StateReady

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.ipc.request import FinishReason
    from stoker.ipc.usage import TokenLogprob

Shown = PromptEcho | StateReady | Delta | Finished | Failed
"""What stays true after it was shown; places in a line and pauses do not."""


class _Choice:
    """One choice's deltas."""

    __slots__ = ("finish_reason", "logprobs", "mirostat_mu", "stop_text", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_text: str | None = None
        self.mirostat_mu: float | None = None

    def take(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_text = delta.stop_text
        self.mirostat_mu = delta.mirostat_mu

    def whole(self, request_id: str, index: int) -> Delta:
        return Delta(
            request_id=request_id,
            index=index,
            text="".join(self.texts),
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_text=self.stop_text,
            mirostat_mu=self.mirostat_mu,
        )


class Transcript:
    """Everything of one request so far.

    Args:
        request_id: of the request.
        shown: what a former program had shown of it.
    """

    def __init__(self, request_id: str, shown: Iterable[Shown] = ()) -> None:
        self._request_id = request_id
        self._before: list[PromptEcho | StateReady] = []
        self._choices: dict[int, _Choice] = {}
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

    def take(self, event: RequestEvent) -> bool:
        """Note an event; False where it repeats what was shown: an echo is there once."""
        match event:
            case Delta():
                self._choices.setdefault(event.index, _Choice()).take(event)
            case PromptEcho() | StateReady():
                if any(type(before) is type(event) for before in self._before):
                    return False
                self._before.append(event)
            case Finished() | Failed():
                self._end = event
        return True

    def shown(self) -> list[Shown]:
        """All of it in few events: what comes before the text, one delta a choice, the end."""
        for choice in self._choices.values():  # what grew piece by piece need not be joined again
            choice.texts = ["".join(choice.texts)]
        deltas = [choice.whole(self._request_id, index) for index, choice in sorted(self._choices.items())]
        return [*self._before, *deltas, *([self._end] if self._end else [])]
