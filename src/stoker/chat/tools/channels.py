"""An answer of messages with headers, as gpt-oss writes it, read as it comes (SPEC D12).

Owns which of them is reasoning, which is a call and which is the answer: a header names a channel and may
address a function. Messages of one kind are parted by a line break. What comes without a header is the
answer, and a call whose arguments are no JSON object is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

from stoker.chat.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    Reasoning,
)
from stoker.chat.json_scan import WHITE, JsonScanner, Step
from stoker.chat.tools.call_text import CALL_NAME, escaped
from stoker.chat.tools.calls import call_id

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STARTS = ("<|start|>", "<|channel|>")
_MARKS = (*_STARTS, *_ENDS, _MESSAGE, "<|constrain|>")
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_MARK_BEGIN = "<"  # and no other character of a mark is one
_MAX_MARK_CHARS = max(map(len, _MARKS))
_MAX_HEADER_CHARS = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TO = "to="
_FUNCTIONS = "functions."
_THOUGHT = "analysis"


class _Kind(Enum):
    """What is being read."""

    START = auto()  # a header without its first mark, or the answer without a header
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ENDED = auto()  # behind a whole call


class ChannelReader:
    """Reads one choice's text.

    Args:
        names: of the tools it may call; None: none are looked for.
        seed: what the ids of calls are made from, such as the answer's id.
        choice: index of the choice, for the ids.
        is_open: the prompt ends inside reasoning.
        refused: of the tools that it knows and may not call; such a call is text.
    """

    def __init__(
        self,
        names: Iterable[str] | None,
        seed: str,
        choice: int = 0,
        *,
        is_open: bool = False,
        refused: Iterable[str] = (),
    ) -> None:
        self.num_calls = 0
        """Calls that are whole."""
        self._names = None if names is None else frozenset(names)
        self._refused = frozenset(refused)
        self._seed = seed
        self._choice = choice
        self._kind = _Kind.REASONING if is_open else _Kind.START
        self._held = ""  # what a mark may begin with
        self._header = ""
        self._name = ""  # of the function that is called
        self._index = -1  # of the last call announced
        self._scanner: JsonScanner | None = None  # of the arguments being read; None: none have come
        self._source: list[str] = []  # of the call being read
        self._arguments: list[str] = []
        self._shown: set[_Kind] = set()  # kinds of which text was delivered
        self._parted: set[_Kind] = set()  # those of which a message has ended behind that
        self._events: list[AnswerEvent] = []

    def __repr__(self) -> str:
        return f"ChannelReader({self._kind.name.lower()}, num_calls={self.num_calls})"

    @property
    def is_reasoning(self) -> bool:
        """Whether the text stands inside reasoning."""
        return self._kind is _Kind.REASONING

    def feed(self, text: str) -> list[AnswerEvent]:
        """What `text` adds."""
        buffer, at = self._held + text, 0
        while (found := _MARK.search(buffer, at)) is not None:
            self._read(buffer[at : found.start()])
            self._mark(found[0])
            at = found.end()
        tail = buffer[at:]
        end = len(tail) - _num_undecided(tail)
        self._read(tail[:end])
        self._held = tail[end:]
        return self._drain()

    def finish(self) -> list[AnswerEvent]:
        """What was held back, when nothing can follow any more."""
        held, self._held = self._held, ""
        self._read(held)
        match self._kind:
            case _Kind.CALL if self._scanner is not None:
                self._take_arguments()
                self._events.append(CallCut(self._index, "".join(self._source)))
            case _Kind.CALL:
                self._say(_Kind.CONTENT, "".join(self._source))
            case _Kind.START | _Kind.HEADER:
                self._say(_Kind.CONTENT, self._header)
        self._header = ""
        return self._drain()

    def _drain(self) -> list[AnswerEvent]:
        self._take_arguments()
        events, self._events = self._events, []
        return events

    def _mark(self, mark: str) -> None:
        if self._kind in {_Kind.START, _Kind.HEADER}:
            self._kind = _Kind.HEADER
            if mark == _MESSAGE:
                self._begin_message(self._header)
            self._header = "" if mark == _MESSAGE or mark in _ENDS else self._header + mark
        elif mark not in _ENDS + _STARTS or (self._scanner is not None and self._scanner.is_in_string):
            self._read(mark)
        else:
            self._end_message()
            self._kind, self._header = _Kind.HEADER, "" if mark in _ENDS else mark

    def _begin_message(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        is_function = recipient is not None and (name != recipient[1] or name in (self._names or ()))
        if self._names is None or name in self._refused:
            is_function = False
        if is_function and CALL_NAME.fullmatch(name):
            self._kind, self._name, self._scanner = _Kind.CALL, name, None
            self._source = [header, _MESSAGE]
        else:
            is_thought = channel is not None and channel[1] == _THOUGHT
            self._kind = _Kind.REASONING if is_thought else _Kind.CONTENT

    def _end_message(self) -> None:
        if self._kind is not _Kind.CALL:
            self._parted |= {self._kind} & self._shown
        elif self._scanner is None:
            self._announce()
            self._arguments.append("{}")
            self._end_call()
        else:
            self._break()

    def _read(self, text: str) -> None:
        if not text:
            return
        match self._kind:
            case _Kind.CALL:
                self._read_call(text)
            case _Kind.START | _Kind.HEADER:
                self._header += text
                begun = self._header.lstrip(WHITE)
                is_header = self._kind is _Kind.HEADER or _TO.startswith(begun[: len(_TO)])
                if not is_header or len(self._header) > _MAX_HEADER_CHARS:
                    header, self._header, self._kind = self._header, "", _Kind.CONTENT
                    self._say(_Kind.CONTENT, header)
            case _Kind.ENDED:
                if text := text.lstrip(WHITE):
                    self._kind = _Kind.CONTENT
                    self._say(_Kind.CONTENT, text)
            case _:
                self._say(self._kind, text)

    def _say(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        self._take_arguments()
        if kind in self._parted:
            self._parted.remove(kind)
            text = "\n" + text
        self._shown.add(kind)
        self._events.append(Reasoning(text) if kind is _Kind.REASONING else text)

    # ------------------------------------------------------------ calls

    def _read_call(self, text: str) -> None:
        for at, char in enumerate(text):
            if self._scanner is None:
                if char == "{":
                    self._announce()
                    self._scanner = JsonScanner()
                elif char not in WHITE:
                    self._kind = _Kind.CONTENT
                    self._say(_Kind.CONTENT, "".join(self._source) + text[at:])
                    return
                else:
                    self._source.append(char)
                    continue
            spelled = escaped(char) if self._scanner.is_in_string else char
            step = self._scanner.push(char)
            if step is Step.WRONG:
                self._break()
                self._say(_Kind.CONTENT, text[at:])
                return
            self._source.append(char)
            self._arguments.append(spelled)
            if step is Step.LAST:
                self._end_call()
                self._read(text[at + 1 :])
                return

    def _announce(self) -> None:
        self._index += 1
        own_id = call_id(self._seed, self._choice, self._index)
        self._events.append(CallBegan(self._index, own_id, self._name))

    def _take_arguments(self) -> None:
        if self._arguments:
            self._events.append(CallArguments(self._index, "".join(self._arguments)))
            self._arguments.clear()

    def _end_call(self) -> None:
        self._take_arguments()
        self._events.append(CallEnded(self._index))
        self.num_calls += 1
        self._scanner = None
        self._kind = _Kind.ENDED

    def _break(self) -> None:
        """What was read is no call after all."""
        self._take_arguments()
        self._events.append(CallBroken(self._index, "".join(self._source)))
        self._scanner = None
        self._kind = _Kind.CONTENT


def _num_undecided(text: str) -> int:
    """Characters at the end of the text that may be the beginning of a mark."""
    at = text.rfind(_MARK_BEGIN, -_MAX_MARK_CHARS)
    return len(text) - at if at >= 0 and any(mark.startswith(text[at:]) for mark in _MARKS) else 0
