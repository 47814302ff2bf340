"""What requests read and wrote, for those who may read it by a request's id (SPEC U7).

Owns the texts of the last requests that ended, in memory alone, and the bound on what is shown of any.
Nothing of it is part of an event, a log, a figure or a recording; who may read it is the server's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.client.requests.record import RequestRecord

MAX_TEXT_CHARS = 32_768
"""Of a prompt, and of all choices together; of a longer one its end is shown."""


class TextEnd(msgspec.Struct, frozen=True):
    """The end of a text: all of it, but for the first `num_left_out` of its `num_chars` characters."""

    text: str
    num_chars: int
    num_left_out: int

    @classmethod
    def of(cls, pieces: Iterable[str], max_chars: int) -> TextEnd:
        """The last characters of what the pieces make together."""
        shown: list[str] = []
        num_shown = num_chars = 0
        for piece in reversed(list(pieces)):
            num_chars += len(piece)
            room = max_chars - num_shown
            if room > 0:
                shown.append(piece[-room:])
                num_shown += len(shown[-1])
        return cls("".join(reversed(shown)), num_chars, num_chars - num_shown)


class RequestText(msgspec.Struct, frozen=True, kw_only=True):
    """What a request reads and has written.

    Attributes:
        request_id: its id.
        owner: digest of the API key that it came with; empty: none.
        is_ended: nothing will be added.
        prompt: as the model reads it; None: it was given as token ids, or is not kept.
        choices: what each choice has written so far, as the model wrote it.
        is_kept: False: it has ended, or is a call of several, and there is no text of it.
    """

    request_id: str
    owner: str
    is_ended: bool
    prompt: TextEnd | None = None
    choices: list[TextEnd] = []
    is_kept: bool = True

    @classmethod
    def of(cls, record: RequestRecord) -> RequestText:
        """That of a request that this program has."""
        request = record.request
        prompt = request.prompt
        per_choice = MAX_TEXT_CHARS // request.n
        return cls(
            request_id=record.request_id,
            owner=record.owner,
            is_ended=record.is_ended,
            prompt=TextEnd.of([prompt], MAX_TEXT_CHARS) if isinstance(prompt, str) else None,
            choices=[
                TextEnd.of((delta.text for delta in record.choices.get(index, ())), per_choice)
                for index in range(request.n)
            ],
        )


class EndedTexts:
    """The texts of the last requests that ended; past `max_kept` the oldest goes."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._texts: OrderedDict[str, RequestText] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EndedTexts {len(self._texts)} of {self._max_kept}>"

    def keep(self, record: RequestRecord) -> None:
        """A request ends: keep what it read and wrote."""
        self._texts[record.request_id] = msgspec.structs.replace(RequestText.of(record), is_ended=True)
        self._texts.move_to_end(record.request_id)
        if len(self._texts) > self._max_kept:
            self._texts.popitem(last=False)

    def find(self, request_id: str) -> RequestText | None:
        """That of the last request that ended with the id."""
        return self._texts.get(request_id)
