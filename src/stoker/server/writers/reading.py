"""A stream's deltas read as answers, one reader a choice (SPEC D7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.chat.answer import AnswerReader
from stoker.request import FinishReason

if TYPE_CHECKING:
    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.messages import Delta


class ChoiceReaders:
    """The readers of one answer's choices.

    Args:
        form: what to look for in the text.
        seed: the answer's id, which the ids of calls are made from.
    """

    def __init__(self, form: AnswerForm, seed: str) -> None:
        self._form = form
        self._seed = seed
        self._readers: dict[int, AnswerReader] = {}
        self.num_reasoning_tokens = 0

    def __repr__(self) -> str:
        return f"ChoiceReaders({len(self._readers)} choices)"

    def read(self, delta: Delta) -> list[AnswerEvent]:
        """What the delta adds to its choice; with the last one, all that was held back."""
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = AnswerReader(self._form, self._seed, delta.index)
        if reader.is_reasoning:
            self.num_reasoning_tokens += len(delta.token_ids)
        events = reader.feed(delta.text)
        return [*events, *reader.finish()] if delta.finish_reason is not None else events

    def finish_reason(self, delta: Delta) -> FinishReason | None:
        """Why the choice ended: an answer that stopped and holds calls ended for their sake (SPEC D4)."""
        reader = self._readers.get(delta.index)
        if delta.finish_reason is FinishReason.STOP and reader is not None and reader.num_calls:
            return FinishReason.TOOL_CALLS
        return delta.finish_reason
