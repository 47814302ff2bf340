"""A model's text read as an answer: reasoning, content and tool calls (SPEC D7).

Owns how the readers follow one another, and the whole answer for those who show none of it before its end.
The server decides what it looks like on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stoker.chat.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    Reasoning,
)
from stoker.chat.reasoning import ReasoningSplitter, ReasoningTags
from stoker.chat.tools.calls import KnownTools, ToolCallParser
from stoker.chat.tools.channels import ChannelReader
from stoker.chat.tools.syntax import ToolSyntax


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What to look for in a model's text.

    Attributes:
        syntax: of tool calls; None: none are looked for.
        names: of the tools it may call.
        tags: of reasoning; None: none is looked for.
        is_reasoning: the text begins inside reasoning.
        texts: of each tool the arguments that may be text, with the other JSON types that each may have;
            empty where a call tells by itself.
        refused: names of the tools that it is told of and may not call; such a call is text.
    """

    syntax: ToolSyntax | None = None
    names: tuple[str, ...] = ()
    tags: ReasoningTags | None = None
    is_reasoning: bool = False
    texts: Mapping[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


class AnswerReader:
    """Reads one choice's text.

    Args:
        form: what to look for.
        seed: what the ids of calls are made from, such as the answer's id.
        choice: index of the choice.
    """

    def __init__(self, form: AnswerForm, seed: str, choice: int = 0) -> None:
        tags, syntax = form.tags, form.syntax
        self._parser: ToolCallParser | ChannelReader | None = None
        self._splitter = None
        if tags is not None and tags.final:
            names = form.names if syntax else None
            self._parser = ChannelReader(names, seed, choice, is_open=form.is_reasoning, refused=form.refused)
            return
        if tags is not None:
            self._splitter = ReasoningSplitter(tags, is_open=form.is_reasoning)
        if syntax is not None:
            tools = KnownTools(form.names, form.refused, form.texts)
            self._parser = ToolCallParser(syntax, tools, seed, choice)

    def __repr__(self) -> str:
        return f"AnswerReader({self._splitter!r}, {self._parser!r})"

    @property
    def num_calls(self) -> int:
        """Calls that are whole."""
        return self._parser.num_calls if self._parser else 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text stands inside reasoning."""
        if isinstance(self._parser, ChannelReader):
            return self._parser.is_reasoning
        return self._splitter is not None and self._splitter.is_reasoning

    def feed(self, text: str) -> list[AnswerEvent]:
        """What `text` adds; nothing of what may still become a tag."""
        if self._splitter is None:
            return self._parsed(text)
        return self._passed_on(self._splitter.feed(text))

    def finish(self) -> list[AnswerEvent]:
        """What was held back, when nothing can follow any more."""
        events = self._passed_on(self._splitter.finish()) if self._splitter else []
        return [*events, *(self._parser.finish() if self._parser else ())]

    def _passed_on(self, parts: Iterable[Reasoning | str]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for part in parts:
            if isinstance(part, Reasoning):
                events.append(part)
            else:
                events += self._parsed(part)
        return events

    def _parsed(self, text: str) -> list[AnswerEvent]:
        if self._parser is not None:
            return list(self._parser.feed(text))
        return [text] if text else []


@dataclass(slots=True)
class WholeCall:
    """One call; `arguments` is a JSON object as text, or the beginning of one where `is_cut`."""

    id: str
    name: str
    arguments: str = ""
    is_cut: bool = False


@dataclass(slots=True)
class WholeAnswer:
    """The answer that a choice's events add up to, as who read it piece by piece has it.

    What began as a call and was none is content; a call within which the text ended stays one.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Take in what came next."""
        for event in events:
            match event:
                case str():
                    self.content += event
                case Reasoning(text):
                    self.reasoning += text
                case CallBegan(_, own_id, name):
                    self.calls.append(WholeCall(own_id, name))
                case CallArguments(_, fragment):
                    self.calls[-1].arguments += fragment
                case CallBroken(_, source):
                    self.calls.pop()
                    self.content += source
                case CallCut():
                    self.calls[-1].is_cut = True
                case CallEnded():
                    pass

    def events(self) -> list[AnswerEvent]:
        """The same answer as events in the order that answers are shown in."""
        events: list[AnswerEvent] = [Reasoning(self.reasoning)] if self.reasoning else []
        events += [self.content] if self.content else []
        for index, call in enumerate(self.calls):
            events += [
                CallBegan(index, call.id, call.name),
                CallArguments(index, call.arguments),
                CallCut(index, call.arguments) if call.is_cut else CallEnded(index),
            ]
        return events
