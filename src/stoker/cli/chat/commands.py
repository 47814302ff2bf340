"""The commands of a chat: their names, what is a command and what is text, and what Tab completes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prompt_toolkit.completion import CompleteEvent
    from rich.console import RenderableType

_TAKES_FILE = frozenset({"/image", "/audio", "/file", "/save", "/save!"})
_WORD = re.compile(r"/[a-z]+!?")


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One command.

    Attributes:
        name: as it is typed.
        takes: what may follow, for /help.
        does: for /help.
    """

    name: str
    takes: str
    does: str


COMMANDS = (
    ChatCommand("/model", "[NAME]", "list the models, or let another one answer from now on"),
    ChatCommand("/system", "[TEXT]", "show the system message, or start over with another (-: with none)"),
    ChatCommand("/image", "[FILE]", "show an image to the model with the next turn"),
    ChatCommand("/audio", "[FILE]", "let the model hear a recording with the next turn"),
    ChatCommand("/file", "[FILE]", "let the model read a PDF or a text with the next turn"),
    ChatCommand("/retry", "[TEMPERATURE]", "answer the last turn again, with another seed"),
    ChatCommand("/save", "FILE", "write the conversation to FILE.md or FILE.json (/save! replaces it)"),
    ChatCommand("/stats", "", "figures of this conversation"),
    ChatCommand("/tools", "", "say which tools the model may call: none"),
    ChatCommand("/clear", "", "forget the conversation; the system message stays"),
    ChatCommand("/help", "", "this list"),
    ChatCommand("/exit", "", "leave, as Ctrl-D does"),
)
NAMES = frozenset({command.name for command in COMMANDS} | {"/quit", "/save!"})
_RULES = """
A line that begins with // is sent with one slash less; one that is no command is sent as it is.
Alt-Enter begins a new line, Tab completes, Ctrl-C stops an answer. Lines typed meanwhile wait."""


def help_table() -> RenderableType:
    """What /help shows."""
    table = Table.grid(padding=(0, 2))
    for command in COMMANDS:
        table.add_row(escape(f"{command.name} {command.takes}"), escape(command.does))
    return Group(table, _RULES)


@dataclass(frozen=True, slots=True)
class Typed:
    """What a line means.

    Attributes:
        command: its name; empty: the line is a turn.
        text: what follows the command, or the turn.
        looks_mistyped: a turn that begins with what could have been meant for a command.
    """

    command: str
    text: str
    looks_mistyped: bool = False


def typed(line: str) -> Typed:
    """What a line means; what is no command is text, such as `/etc/hosts what is this?`."""
    line = line.strip()
    if line.startswith("//"):
        return Typed("", line[1:])
    word, _, rest = line.partition(" ")
    if word in NAMES:
        return Typed("/exit" if word == "/quit" else word, rest.strip())
    return Typed("", line, looks_mistyped=_WORD.fullmatch(word) is not None)


def file_of(text: str) -> Path:
    """The file that a command names; quotes around it and `~` are understood.

    Raises:
        InvalidRequestError: there is no home of such a user.
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(f"{text}: {error}", param="file") from None


class CommandCompleter(Completer):
    """Completes commands, the names of models and files.

    Args:
        models: gives the names that /model takes.
    """

    def __init__(self, models: Callable[[], Sequence[str]]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """What may stand at the cursor."""
        line = document.text_before_cursor
        word, space, rest = line.partition(" ")
        if not line.startswith("/") or "\n" in line:
            return
        if not space:
            shown = [(command.name, command.does) for command in COMMANDS]
            yield from (
                Completion(name, -len(word), display_meta=does)
                for name, does in shown
                if name.startswith(word)
            )
        elif word == "/model":
            names = (name for name in self._models() if name.startswith(rest))
            yield from (Completion(name, -len(rest)) for name in names)
        elif word in _TAKES_FILE:
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)
