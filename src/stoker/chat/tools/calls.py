"""Tool calls out of a model's text as it comes (SPEC D7).

Owns where calls begin and end, and what is held back meanwhile: text that may begin a call's opener, and
white space before it. Whatever turns out to be no call is content; nothing is lost. How the text is cut into
pieces changes nothing but how the events are cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

from stoker.chat.answer_events import (
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    CallEvent,
)
from stoker.chat.json_scan import WHITE, Step
from stoker.chat.tools.call_literal import LiteralCall
from stoker.chat.tools.call_tags import TaggedCall, Texts
from stoker.chat.tools.call_text import CallObject, CallText, MarkedCall
from stoker.chat.tools.syntax import CallBody, ToolSyntax

_ID_DIGITS = 24
_FENCE, _FENCE_END = "```json", "```"  # what many models write in place of their own tags
_BEHIND = WHITE + "}"  # between a call and its closer; small models write a brace too many


def call_id(seed: str, choice: int, index: int) -> str:
    """`call_` and 24 hex digits, always the same for one call of an answer, so that a replay repeats it."""
    digest = hashlib.sha256(f"{seed}\n{choice}\n{index}".encode()).hexdigest()
    return f"call_{digest[:_ID_DIGITS]}"


class _Channel(Enum):
    """What a character did to a reading."""

    MORE = auto()
    PASSED = auto()  # it belongs to the calls before it
    ENDED = auto()  # a call ends with it
    ENDED_BEFORE = auto()  # a call had ended; the character is yet to be read
    CLOSED = auto()  # nothing can follow
    LEFT = auto()  # it is text again, as is what came since the last call; the character is yet to be read
    BROKEN = auto()  # what came since the last call is no call; the character is yet to be read


_TAKEN = frozenset({_Channel.MORE, _Channel.PASSED, _Channel.ENDED, _Channel.CLOSED})


class _Inside(Enum):
    HEAD = auto()
    ITEM = auto()
    CALL = auto()
    TAIL = auto()


class _Reading:
    """The text from an opener on: one call, a list of them, or a section of them.

    Args:
        opening: where it begins.
        lead: text before the opener that goes with it.
        syntax: how the model writes calls.
        tools: that the model is told of.

    Attributes:
        call: the call being read, or the last one.
    """

    def __init__(self, opening: _Opening, lead: str, syntax: ToolSyntax, tools: KnownTools) -> None:
        self.call: CallText = CallObject()
        self._source = [lead, opening.opener]
        self._names = opening.names
        self._closers = opening.closers
        self._syntax = syntax
        self._tools = tools
        self._is_section = bool(syntax.call_opener) and opening.opener != syntax.call_opener
        is_call = bool(syntax.call_opener) and not self._is_section
        self._place = _Inside.ITEM if is_call else _Inside.HEAD
        self._is_list = False
        self._begun = ""  # of a mark between calls
        marks = (syntax.call_closer, syntax.call_opener, *opening.closers)
        self._marks = tuple(text for text in marks if text)
        self._skipped = _BEHIND + ("`" if "`" in syntax.marker else "")

    @property
    def source(self) -> str:
        """What came since the opener or the last call, the opener included."""
        return "".join(self._source)

    @property
    def has_begun(self) -> bool:
        """Whether the name of the call being read is known, and arguments have come."""
        return self._place is _Inside.CALL and self.call.has_begun

    @property
    def is_complete(self) -> bool:
        """Whether the call being read lacks no more than what closes it."""
        return self._place is _Inside.CALL and self.call.is_complete

    @property
    def is_after_call(self) -> bool:
        """Whether a call has ended and nothing has come but what may stand behind one."""
        return self._place is _Inside.TAIL

    def push(self, char: str) -> _Channel:
        """Take one character."""
        match self._place:
            case _Inside.CALL:
                turn = self._in_call(char)
            case _Inside.TAIL:
                turn = self._in_list_tail(char) if self._is_list else self._in_tail(char)
            case _:
                turn = self._before_call(char)
        if turn is _Channel.MORE:
            self._source.append(char)
        return turn

    def _before_call(self, char: str) -> _Channel:
        if char in WHITE and not self._begun:
            return _Channel.MORE
        if self._place is _Inside.HEAD and not self._syntax.marker and char == "[":
            self._place, self._is_list = _Inside.ITEM, True
            return _Channel.MORE
        is_object = char == "{" and not self._syntax.marker and self._place is _Inside.HEAD
        if self._is_section and self._place is _Inside.HEAD and not is_object:
            return self._in_call_opener(char)
        self._place = _Inside.CALL
        self.call = self._begun_call(char)
        return self._in_call(char)

    def _in_call_opener(self, char: str) -> _Channel:
        self._begun += char
        if self._begun == self._syntax.call_opener:
            self._place, self._begun = _Inside.ITEM, ""
        elif not self._syntax.call_opener.startswith(self._begun):
            return _Channel.BROKEN
        return _Channel.MORE

    def _begun_call(self, char: str) -> CallText:
        """What reads a call that begins with the character; models write JSON in place of their own form."""
        syntax = self._syntax
        if syntax.body is CallBody.MARKED:
            return MarkedCall(syntax.marker, syntax.name_prefix)
        if syntax.body is CallBody.TAGGED and syntax.tags is not None and char not in "{[":
            return TaggedCall(syntax.tags, self._tools.texts)
        if syntax.body is CallBody.LITERAL and char not in "{[":
            return LiteralCall(self._names, syntax.quote)
        return CallObject(self._names)

    def _in_call(self, char: str) -> _Channel:
        step = self.call.push(char)
        is_named = self.call.has_begun or step is not Step.MORE
        if step is Step.WRONG or (is_named and self.call.name in self._tools.refused):
            return _Channel.BROKEN
        if step is Step.MORE:
            return _Channel.MORE
        self._place = _Inside.TAIL
        self._source.clear()
        return _Channel.ENDED if step is Step.LAST else _Channel.ENDED_BEFORE

    def _in_list_tail(self, char: str) -> _Channel:
        if char == "]":
            self._is_list = False
            self._source.clear()
            return _Channel.PASSED
        if char == ",":
            self._place = _Inside.ITEM
        return _Channel.MORE if char in WHITE + "," else _Channel.LEFT

    def _in_tail(self, char: str) -> _Channel:
        begun = (self._begun + char).lstrip(self._skipped)
        if not any(mark.startswith(begun) for mark in self._marks):
            return _Channel.LEFT
        self._begun = begun
        if not begun or begun not in self._marks:
            return _Channel.MORE
        if begun in self._closers:
            return _Channel.CLOSED
        self._begun = ""
        if begun == self._syntax.call_opener:
            self._place = _Inside.ITEM
            return _Channel.MORE
        self._source.clear()
        return _Channel.PASSED


@dataclass(frozen=True, slots=True)
class _Opening:
    """Where a call begins.

    Attributes:
        at: index in the text.
        opener: what it begins with, before the call itself.
        closers: what may follow the call.
        names: the names it may have; None: any.
    """

    at: int
    opener: str
    closers: tuple[str, ...]
    names: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class KnownTools:
    """The tools that a model is told of.

    Attributes:
        names: of those it may call; a call without its opener has to name one of them.
        refused: names of those it may not call; such a call is text.
        texts: of each tool the arguments that may be text, as `call_tags.texts_of` finds them.
    """

    names: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    texts: Mapping[str, Texts] = field(default_factory=dict)


class ToolCallParser:
    """Splits one choice's text into content and calls.

    Args:
        syntax: how the model writes calls.
        tools: that it is told of.
        seed: what the ids are made from, such as the answer's id.
        choice: index of the choice, for the ids.
    """

    def __init__(self, syntax: ToolSyntax, tools: KnownTools, seed: str, choice: int = 0) -> None:
        self.num_calls = 0
        """Calls that are whole."""
        self._syntax = syntax
        self._tools = tools
        self._names = frozenset(tools.names)
        self._seed = seed
        self._choice = choice
        self._space: list[str] = []  # white space, or a gap, before what may follow
        self._held = ""  # what may begin a call, behind that
        self._reading: _Reading | None = None
        self._index = -1  # of the last call announced
        self._is_announced = False  # the call being read
        self._gap = WHITE  # what may stand before a call without its opener
        self._is_in_gap = True
        self._events: list[CallEvent] = []

    def __repr__(self) -> str:
        return f"ToolCallParser({self._syntax.name}, num_calls={self.num_calls}, held={len(self._held)})"

    def feed(self, text: str) -> list[CallEvent]:
        """What `text` adds."""
        while text:
            text = self._scan(text) if self._reading is None else self._read(self._reading, text)
        if self._reading is not None:
            self._take_arguments(self._reading)
        return self._drain()

    def finish(self) -> list[CallEvent]:
        """What was held back, when nothing can follow any more."""
        reading, self._reading = self._reading, None
        if reading is None:
            held, self._held = self._taken_space() + self._held, ""
            if not (self.num_calls and self._is_in_gap) or held.strip():
                self._say(held)
        elif reading.is_complete:
            self._end_call(reading)
        elif not reading.is_after_call:
            self._break(reading, CallCut)
        return self._drain()  # behind a call nothing is held but white space and the beginning of its closer

    def _drain(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ text

    def _scan(self, text: str) -> str:
        """Look for a call in the text; returns what comes behind its opener."""
        buffer = self._held + text
        bare = buffer.lstrip(self._gap if self._is_in_gap else WHITE)
        self._space.append(buffer[: len(buffer) - len(bare)])
        self._held = ""
        if not bare:
            return ""
        found = self._opening(bare)
        if found is None:
            end = len(bare) - self._num_undecided(bare)
            self._deliver(bare[:end])
            self._held = bare[end:]
            return ""
        self._deliver(bare[: found.at])
        self._reading = _Reading(found, self._taken_space(), self._syntax, self._tools)
        return bare[found.at + len(found.opener) :]

    def _opening(self, text: str) -> _Opening | None:
        """Where a call begins; None: nowhere yet. No white space begins the text."""
        openers, closers = self._syntax.openers, self._syntax.closers
        if self._is_in_gap and self._syntax.bare and not _may_begin(text, openers):
            if text[0] in self._syntax.bare:
                return _Opening(0, "", closers, self._names)
            if text.startswith(_FENCE):
                return _Opening(0, _FENCE, (_FENCE_END,), self._names)
        found = _pattern(openers).search(text)
        return None if found is None else _Opening(found.start(), found[0], closers)

    def _num_undecided(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of an opener."""
        if self._is_in_gap and self._syntax.bare and _FENCE.startswith(text):
            return len(text)
        return max(_overlap(text, opener) for opener in self._syntax.openers)

    def _deliver(self, text: str) -> None:
        """Deliver text, with the white space before it; what ends it stays, as it may stand before a call."""
        if shown := text.rstrip(WHITE):
            self._say(self._taken_space() + shown)
            self._space.append(text[len(shown) :])

    def _taken_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _say(self, text: str) -> None:
        if not text:
            return
        self._is_in_gap, self._gap = False, WHITE
        if self._events and isinstance(last := self._events[-1], str):
            self._events[-1] = last + text
        else:
            self._events.append(text)

    # ------------------------------------------------------------ calls

    def _read(self, reading: _Reading, text: str) -> str:
        """Read on in a call; returns what does not belong to it."""
        at = 0
        while at < len(text):
            turn = reading.push(text[at])
            at += turn in _TAKEN
            if turn in {_Channel.MORE, _Channel.PASSED}:
                if reading.has_begun and not self._is_announced:
                    self._announce(reading)
            elif turn in {_Channel.ENDED, _Channel.ENDED_BEFORE}:
                self._end_call(reading)
            else:
                self._reading = None
                if turn is _Channel.BROKEN:
                    self._break(reading)
                return (reading.source if turn is _Channel.LEFT else "") + text[at:]
        return ""

    def _announce(self, reading: _Reading) -> None:
        self._is_announced = True
        self._index += 1
        own_id = call_id(self._seed, self._choice, self._index)
        self._events.append(CallBegan(self._index, own_id, reading.call.name))

    def _take_arguments(self, reading: _Reading) -> None:
        if fragment := reading.call.take():
            self._events.append(CallArguments(self._index, fragment))

    def _end_call(self, reading: _Reading) -> None:
        if not self._is_announced:
            self._announce(reading)
        self._take_arguments(reading)
        self._events.append(CallEnded(self._index))
        self._is_announced = False
        self.num_calls += 1
        self._is_in_gap, self._gap = True, WHITE + self._syntax.separator

    def _break(self, reading: _Reading, how: type[CallBroken | CallCut] = CallBroken) -> None:
        """What was read is no call after all, or not all of one."""
        if not self._is_announced:
            self._say(reading.source)
            return
        self._take_arguments(reading)
        self._events.append(how(self._index, reading.source))
        self._is_announced = self._is_in_gap = False
        self._gap = WHITE


@lru_cache(maxsize=64)
def _pattern(openers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(openers, key=len, reverse=True))))


def _may_begin(text: str, openers: tuple[str, ...]) -> bool:
    """Whether the text begins with an opener, or with the beginning of one where it is all there is."""
    return any(opener.startswith(text[: len(opener)]) for opener in openers)


def _overlap(text: str, opener: str) -> int:
    """Length of the longest end of `text` that `opener` begins with, less than all of it."""
    for length in range(min(len(opener) - 1, len(text)), 0, -1):
        if text.endswith(opener[:length]):
            return length
    return 0
