"""The chat's place in a terminal: the answer above, the line that is typed below it.

Owns all that is written to the terminal while a chat runs, so that nothing is written into something else.
What is certain is printed for good and scrolls away. Below it stand, drawn again as they change, the part of
the answer that may still change, what is waited for, the lines that wait for their turn, and the input line.
prompt-toolkit draws them and edits the line, rich renders answers; where they are cut is `cli.markdown`'s.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, HSplit, Layout, Window
from rich.console import Console
from rich.segment import Segment, Segments
from rich.styled import Styled
from rich.text import Text

from stoker.cli.markdown import THEME, AnswerMarkdown, LineStream, MarkdownStream, lines_of
from stoker.cli.session import CONTROLS, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from prompt_toolkit.completion import Completer
    from prompt_toolkit.formatted_text import AnyFormattedText
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent
    from rich.console import RenderableType

    from stoker.cli.chat.session import ChatReply
    from stoker.cli.markdown import Block
    from stoker.errors import StokerError

PROMPT, CONTINUATION = "> ", ". "
REDRAW_S = 0.05
LEAVING = "Ctrl-C again or Ctrl-D leaves"
WORKING = "..."

Lines = list[list[Segment]]
Render = Callable[["Block"], Lines]


class Ink:
    """How the blocks of an answer look in this terminal, and what they are as text for it."""

    def __init__(self) -> None:
        real = Console()
        self.is_plain = bool(os.environ.get("NO_COLOR"))
        self._color_system = real.color_system
        self._columns = 0
        self._console = real

    def __repr__(self) -> str:
        return f"Ink({self._color_system}, plain={self.is_plain})"

    def fit(self, columns: int) -> None:
        """Render for a terminal so wide from now on."""
        if columns != self._columns:
            self._columns = columns
            self._console = Console(
                file=io.StringIO(),
                force_terminal=True,
                color_system=self._color_system,  # type: ignore[arg-type]  # what the library says of itself
                width=max(columns, 1),
                theme=THEME,
                highlight=False,
            )

    def answer(self, block: Block) -> Lines:
        """A block of an answer."""
        content = Text(block.source) if self.is_plain else AnswerMarkdown(block.source)
        return lines_of(content, self._console)

    def text(self, text: str, style: str = "") -> Lines:
        """Text that is no Markdown."""
        return lines_of(Text(text, style), self._console)

    def said(self, content: RenderableType) -> Lines:
        """What is no part of the conversation."""
        return lines_of(Styled(content, "" if self.is_plain else "dim"), self._console)

    def ansi(self, lines: Lines) -> str:
        """The lines with their escapes."""
        segments = [segment for line in lines for segment in (*line, Segment.line())]
        with self._console.capture() as captured:
            self._console.print(Segments(segments), end="", soft_wrap=True)
        return captured.get()

    def num_rows(self, source: str) -> int:
        """About as many rows as it will take, without rendering it."""
        return sum(1 + len(line) // self._columns for line in source.splitlines())


class _OpenAnswer:
    """The answer that is being written: what of it may still change."""

    def __init__(self, ink: Ink) -> None:
        self._ink = ink
        self._text: MarkdownStream | LineStream = LineStream() if ink.is_plain else MarkdownStream()
        self._thought = LineStream()
        self._is_begun = False

    def think(self, text: str) -> Lines:
        """A piece of reasoning; the lines that are certain now."""
        return self._certain(self._thought.feed(text), self._thought_lines)

    def write(self, text: str, num_rows: int) -> Lines:
        """A piece of the answer; the lines that are certain now, or would leave the screen of `num_rows`."""
        lines = self._certain(self._thought.finish(), self._thought_lines)
        blocks = self._text.feed(text)
        if self._ink.num_rows(self._text.open.source) > num_rows:
            blocks += self._text.cut()
        return lines + self._certain(blocks, self._ink.answer)

    def finish(self) -> Lines:
        """The rest."""
        lines = self._certain(self._thought.finish(), self._thought_lines)
        return lines + self._certain(self._text.finish(), self._ink.answer)

    def open_lines(self) -> Lines:
        """What may still change."""
        if self._thought.open.source:
            return self._spaced(self._thought.open, self._thought_lines(self._thought.open))
        return self._spaced(self._text.open, self._ink.answer(self._text.open))

    def _thought_lines(self, block: Block) -> Lines:
        return self._ink.text(block.source, "dim italic")

    def _certain(self, blocks: list[Block], render: Render) -> Lines:
        lines: Lines = []
        for block in blocks:
            lines += self._spaced(block, render(block))
            self._is_begun = True
        return lines

    def _spaced(self, block: Block, lines: Lines) -> Lines:
        """With a blank line before it, unless it goes on with what is above it."""
        return [[], *lines] if lines and self._is_begun and not block.is_sequel else lines


class TerminalScreen:
    """A `ChatScreen` on a terminal that can move its cursor, from `async with` to its end.

    Enter sends, Alt-Enter begins a new line. Ctrl-C stops the answer and puts lines that wait back into the
    input line; with nothing to stop it clears that line, and a second time it leaves. Ctrl-D leaves.

    Args:
        history: of what was typed.
        completer: for Tab.
    """

    def __init__(self, history: History, completer: Completer) -> None:
        self._ink = Ink()
        self._typed: deque[str] = deque()
        self._has_news = asyncio.Event()
        self._answer: _OpenAnswer | None = None
        self._task: asyncio.Future[None] | None = None
        self._waiting_for = ""
        self._is_leaving = False  # one Ctrl-C was typed, nothing since
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            history=history,
            completer=completer,
            complete_while_typing=False,
            key_bindings=self._bindings(),
            prompt_continuation=CONTINUATION,
            enable_suspend=True,
            erase_when_done=True,
        )
        self._app = self._session.app
        self._app.min_redraw_interval = REDRAW_S
        self._app.layout = Layout(
            HSplit(
                [
                    ConditionalContainer(
                        Window(FormattedTextControl(self._drawn), dont_extend_height=True),
                        Condition(lambda: self._answer is not None or any(self._below())),
                    ),
                    self._app.layout.container,
                ]
            ),
            self._session.default_buffer,
        )
        self._session.default_buffer.on_text_changed += lambda _: self._stay()
        self._typing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"TerminalScreen({len(self._typed)} lines wait)"

    async def __aenter__(self) -> Self:
        self._typing = asyncio.create_task(self._type())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._typing is not None
        self._leave()
        await self._typing

    # ------------------------------------------------------------ lines

    async def read(self) -> str:
        """The next line that was typed, which is shown as such. Raises EOFError behind the last one."""
        assert self._typing is not None
        while not self._typed:
            if self._typing.done():
                raise EOFError
            self._has_news.clear()
            await self._has_news.wait()
        line = self._typed.popleft()
        shown = line.replace("\n", f"\n{CONTINUATION}")
        self._print(self._lines(f"{PROMPT}{shown}", "bold"))
        return line

    async def _type(self) -> None:
        """Edit lines until the person leaves."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        try:
            await self._session.prompt_async()
        except EOFError:
            pass
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            if self._task is not None:
                self._task.cancel()
            self._typed.clear()
            self._has_news.set()

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("enter")
        def _send(event: KeyPressEvent) -> None:
            if event.current_buffer.text.strip():
                self._typed.append(event.current_buffer.text)
                event.current_buffer.reset(append_to_history=True)
                self._has_news.set()

        @bindings.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c")
        @bindings.add("<sigint>")
        def _interrupt(_: KeyPressEvent) -> None:
            self._interrupt()

        return bindings

    def _interrupt(self) -> None:
        """What Ctrl-C does: stop, else clear, else leave."""
        buffer = self._session.default_buffer
        if self._is_leaving:
            self._leave()
        elif self._task is not None:
            self._task.cancel()
            buffer.insert_text("\n".join(self._typed))
            self._typed.clear()
        else:
            buffer.reset()
        self._is_leaving = True
        self._app.invalidate()

    def _stay(self) -> None:
        self._is_leaving = False

    def _leave(self) -> None:
        if self._app.is_running and not self._app.is_done:
            self._app.exit(exception=EOFError)

    @contextmanager
    def answering(self, task: asyncio.Future[None]) -> Iterator[None]:
        """While entered, Ctrl-C cancels the task, and so does leaving."""
        self._task, self._is_leaving = task, False
        try:
            yield
        finally:
            self._task = None
            self.wait("")

    # ------------------------------------------------------------ what is shown

    def wait(self, text: str) -> None:
        """Say what is waited for, in one line, until something comes."""
        self._waiting_for = text
        self._app.invalidate()

    def think(self, text: str) -> None:
        """A piece of the model's reasoning."""
        self._waiting_for = ""
        self._print(self._begun().think(text.translate(CONTROLS)))

    def write(self, text: str) -> None:
        """A piece of the answer."""
        self._waiting_for = ""
        self._print(self._begun().write(text.translate(CONTROLS), self._num_rows()))

    def end(self, reply: ChatReply) -> None:
        """Print what is left of the answer, and its figures."""
        answer, self._answer = self._begun(), None
        self._print([*answer.finish(), *self._lines(reply.figures, "dim"), []])

    def say(self, content: RenderableType) -> None:
        """Something to the person at the terminal."""
        self._fit()
        self._print([*self._ink.said(content), []])

    def fail(self, error: StokerError, advice: str = "") -> None:
        """A turn or a command has failed."""
        rest, self._answer = self._answer.finish() if self._answer else [], None
        self._print([*rest, *self._lines(f"stoker: {text_of(error)}{advice}", "red"), []])

    def _begun(self) -> _OpenAnswer:
        self._fit()
        if self._answer is None:
            self._answer = _OpenAnswer(self._ink)
        return self._answer

    def _lines(self, text: str, style: str) -> Lines:
        self._fit()
        return self._ink.text(text.translate(CONTROLS), "" if self._ink.is_plain else style)

    def _fit(self) -> None:
        self._ink.fit(self._app.output.get_size().columns)

    def _num_rows(self) -> int:
        """Rows for what may still change: the screen without the input and one more for each line below."""
        typed_rows = self._session.default_buffer.document.line_count
        return max(1, self._app.output.get_size().rows - typed_rows - len(self._typed) - 2)

    def _print(self, lines: Lines) -> None:
        """For good, above what is drawn."""
        if lines:
            self._app.renderer.erase()
            self._app.output.write_raw(self._ink.ansi(lines))
            self._app.output.flush()
            self._app.renderer.request_absolute_cursor_position()
        self._app.invalidate()

    def _drawn(self) -> AnyFormattedText:
        """What stands above the input line now."""
        if self._app.is_done:
            return ""
        self._fit()
        lines = self._answer.open_lines()[-self._num_rows() :] if self._answer else []
        for text in self._below():
            lines += self._lines(text, "dim")[:1]
        return ANSI(self._ink.ansi(lines).removesuffix("\n"))

    def _below(self) -> Iterator[str]:
        if self._waiting_for:
            yield self._waiting_for
        elif self._task is not None and self._answer is None:
            yield WORKING
        yield from (f"next: {line.splitlines()[0]}" for line in self._typed)
        if self._is_leaving and self._task is None:
            yield LEAVING
