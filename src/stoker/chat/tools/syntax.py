"""How a family of models writes tool calls, as data (SPEC D12).

Owns what a format declares: what its calls look like in a text, how a chat template shows that it is this
one, which form a forced call has, and what a history has to look like. `calls` reads by it, `history` lays
out by it, `constraints` force it; the formats themselves are in `formats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stoker.chat.reasoning import ReasoningTags


class CallBody(StrEnum):
    """What stands in a call."""

    OBJECT = "object"  # {"name": ..., "arguments": {...}}
    MARKED = "marked"  # name, marker, {...}
    TAGGED = "tagged"  # name, and each argument between tags
    LITERAL = "literal"  # name(key=value, ...) or name{key:value, ...}
    CHANNELS = "channels"  # a whole answer of messages with headers


@dataclass(frozen=True, slots=True)
class CallTags:
    """The text around the parts of a call whose arguments stand between tags.

    Attributes:
        name_end: behind the name; empty: it ends before the first character that no name has.
        key: before and after the name of an argument.
        value: before and after its value; the first may be empty.
        end: behind the last argument.
        is_padded: values stand on lines of their own.
        kinds: what stands behind a key whose value is text, and behind one of JSON; empty: nothing.
        wrapper: what may enclose a value that itself holds tags; both empty: nothing does.
    """

    name_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    is_padded: bool = False
    kinds: tuple[str, ...] = ()
    wrapper: tuple[str, str] = ("", "")

    def before(self, name: str, *, is_text: bool) -> str:
        """What stands before the value of an argument, which is text or JSON."""
        kind = self.kinds[not is_text] if self.kinds else ""
        return f"{self.key[0]}{name}{kind}{self.key[1]}{self.value[0]}{self.line}"

    @property
    def after(self) -> str:
        """What stands behind a value."""
        return f"{self.line}{self.value[1]}"

    @property
    def line(self) -> str:
        """The line break around a value, where it stands on lines of its own."""
        return "\n" if self.is_padded else ""

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Arguments of a call as text, each on a line."""
        lines = []
        for name, value in arguments.items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            if is_text and any(self.wrapper) and ("<" in text or "\n" in text):
                text = text.join(self.wrapper)
            lines.append(f"{self.before(name, is_text=is_text)}{text}{self.after}\n")
        return "".join(lines)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """What calls look like in a text.

    Attributes:
        name: of the format.
        opener: the text before a call; of a section or a list, before that.
        closer: the text behind what `opener` begins; empty: nothing stands there.
        body: what stands between.
        also: other spellings of `opener`.
        also_closers: other spellings of `closer`.
        call_opener, call_closer: around each call of a section; empty: there are no sections.
        bare: characters that a call without its opener begins with, where it stands alone; empty: none is
            taken.
        separator: what may stand between two calls besides white space.
        marker: between the name and the arguments of a marked call.
        name_prefix: what models write before a name that is not part of it.
        quote: what encloses a text in literals, besides the usual quotes.
        tags: of tagged calls.
    """

    name: str
    opener: str
    closer: str = ""
    body: CallBody = CallBody.OBJECT
    also: tuple[str, ...] = ()
    also_closers: tuple[str, ...] = ()
    call_opener: str = ""
    call_closer: str = ""
    bare: str = "{["
    separator: str = ""
    marker: str = ""
    name_prefix: str = ""
    quote: str = ""
    tags: CallTags | None = None

    @property
    def openers(self) -> tuple[str, ...]:
        """All that a call or a section may begin with."""
        calls = (self.call_opener,) if self.call_opener else ()
        return tuple(text for text in (self.opener, *self.also, *calls) if text)

    @property
    def closers(self) -> tuple[str, ...]:
        """All that a call or a section may end with."""
        return tuple(text for text in (self.closer, *self.also_closers) if text)


@dataclass(frozen=True, slots=True)
class ForcedForm:
    """How a forced answer is written; `$name` stands for the tool's name.

    Attributes:
        head, tail: before and after the arguments of a call, which are a JSON object, or tagged where the
            syntax has tags.
        before, between, after: around the calls and between two.
    """

    head: str
    tail: str = ""
    before: str = ""
    between: str = ""
    after: str = ""

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, each a tool's name and its arguments as they stand between head and tail."""
        each = [f"{self.head.replace('$name', name)}{arguments}{self.tail}" for name, arguments in calls]
        return f"{self.before}{self.between.join(each)}{self.after}"


@dataclass(frozen=True, slots=True)
class History:
    """What a template of the format wants of the turns.

    Attributes:
        has_one_call_a_turn: it refuses or passes over further calls of a turn.
        has_short_ids: it refuses ids of any length but nine.
        thought: the field in which it looks for reasoning.
        tools_in_system: it looks for the tools, as JSON text, in a field of the system's turn.
        thought_or_text: it refuses a turn that has calls, reasoning and text; the text goes to the reasoning.
    """

    has_one_call_a_turn: bool = False
    has_short_ids: bool = False
    thought: str = "reasoning_content"
    tools_in_system: bool = False
    thought_or_text: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    Attributes:
        syntax: of its calls.
        forced: how a forced answer is written.
        marks: texts that tell a template of this format: all of one of the groups stand in it.
        unmarked: texts that no template of this format has.
        is_native: the template takes `tools` itself; else the prompt has to tell the model.
        introduction: what tells it, with `{tools}` for the list; empty: the generic text.
        control_tokens: tokens that have to be spelled out in the text for a call to be seen.
        prefill: what a forced call's prompt ends with where no reasoning comes first; `forced` begins behind.
        history: what its template wants of the turns.
        tags: of the reasoning that every answer of the format may have; None: the template tells.
    """

    syntax: ToolSyntax
    forced: ForcedForm
    marks: tuple[tuple[str, ...], ...] = ()
    unmarked: tuple[str, ...] = ()
    is_native: bool = True
    introduction: str = ""
    control_tokens: tuple[str, ...] = ()
    prefill: str = ""
    history: History = field(default_factory=History)
    tags: ReasoningTags | None = None

    @property
    def name(self) -> str:
        """Of its syntax, by which it can be asked for."""
        return self.syntax.name

    @property
    def stop(self) -> str:
        """The text that ends the first call and does not belong to it; empty: there is none."""
        return self.syntax.call_closer or self.syntax.closer

    def is_of(self, template: str) -> bool:
        """Whether a chat template (Jinja source) shows this format."""
        if any(mark in template for mark in self.unmarked):
            return False
        return any(all(mark in template for mark in group) for group in self.marks)
