"""Questions to the engine that await a `Reply`.

Owns the pairing by call id. When the engine ends, a question is asked again, unless engines ended on it too
often, or its answer would be about the one that ended.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import NotReadyError, error_from_info
from stoker.ipc.commands import ExportState, GetStatus, ImportState, StateQuestion, TextQuestion
from stoker.ipc.events import Reply

if TYPE_CHECKING:
    from stoker.client.process.exit import EngineExit
    from stoker.errors import StokerError

MAX_CRASHES = 2
"""After the first a question is asked alone: the second is its own."""

Question = TextQuestion | StateQuestion | GetStatus


@dataclass(slots=True)
class _Call:
    question: Question
    answer: asyncio.Future[dict[str, Any]]
    is_sent: bool = False
    crashes: int = 0

    @property
    def is_about_now(self) -> bool:
        """Whether it is of what this engine has, and of no other; the loop answers it at once."""
        return isinstance(self.question, GetStatus | ExportState | ImportState)


class Calls:
    """Every question without an answer."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Calls waiting={len(self._calls)}>"

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, question: Question) -> asyncio.Future[dict[str, Any]]:
        """Register `question` under an id of its own; `take_unsent` hands it out.

        Returns:
            The answer to come; it raises what the engine answered, or why there is no answer.
        """
        call_id = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = _Call(msgspec.structs.replace(question, call_id=call_id), answer)
        answer.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return answer

    def take_unsent(self, *, has_texts: bool) -> list[Question]:
        """Questions that this engine has not been asked; they count as asked from here on.

        A question about text on which an engine ended is asked while no other one about text is open.

        Args:
            has_texts: questions about text may be asked now; those about what it has now always may.
        """
        texts = self._open_texts()
        if suspects := [call for call in texts if call.crashes]:
            texts = [] if any(call.is_sent for call in texts) else suspects[:1]
        present = [call for call in self._open() if call.is_about_now]
        unsent = [call for call in present + (texts if has_texts else []) if not call.is_sent]
        for call in unsent:
            call.is_sent = True
        return [call.question for call in unsent]

    def in_flight(self) -> list[str]:
        """Questions that the engine may be computing an answer to, for people."""
        return [f"the question {call.question.call_id}" for call in self._open_texts() if call.is_sent]

    def settle(self, reply: Reply) -> None:
        """An answer arrived; one that is not awaited is dropped."""
        call = self._calls.get(reply.call_id)
        if call is None or call.answer.done():
            return
        if reply.error is not None:
            call.answer.set_exception(error_from_info(reply.error))
        else:
            call.answer.set_result(reply.value)

    def engine_exited(self, ended: EngineExit) -> None:
        """The engine has ended: the next one is asked what can be asked again."""
        for call in self._open():
            if call.is_about_now:
                call.answer.set_exception(NotReadyError("the engine is restarting", retry_after_s=1.0))
                continue
            call.crashes += call.is_sent and ended.is_blamable
            call.is_sent = False
            if call.crashes >= MAX_CRASHES:
                text = f"the engine died {call.crashes} times on this call, last"
                call.answer.set_exception(ended.error(text, call.crashes))

    def fail_all(self, error: StokerError) -> None:
        """No engine will answer any more."""
        for call in self._open():
            call.answer.set_exception(error)

    def _open_texts(self) -> list[_Call]:
        return [call for call in self._open() if not call.is_about_now]

    def _open(self) -> list[_Call]:
        return [call for call in self._calls.values() if not call.answer.done()]
