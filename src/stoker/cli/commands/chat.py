"""`stoker chat`: a conversation in the terminal.

Owns the conversation, its commands and where its lines come from: an editable, remembered line in a terminal,
or a pipe. Ctrl-C ends the answer that is being written, not the program; what was written stays part of the
conversation.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol

import platformdirs
import typer

from stoker.cli.options import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    Config,
    CtxSize,
    MaxTokens,
    Model,
    Seed,
    Temperature,
    Threads,
    engine_settings,
)
from stoker.cli.session import ReplyText, opened, write_answer
from stoker.errors import ContextLengthError, StokerError
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.private import make_folder

if TYPE_CHECKING:
    from pathlib import Path

    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from stoker.cli.options import RuntimeFactory
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

HISTORY_FILE = "chat_history"
HELP = """\
/system TEXT   start over with TEXT as the system message (without TEXT: none)
/clear         start over
/exit          leave (so does Ctrl-D)
Alt-Enter makes a new line, Enter sends, Ctrl-C stops an answer."""


def chat(
    *,
    ctx: typer.Context,
    model: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", metavar="TEXT")] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    seed: Seed = None,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Talk with a model; Ctrl-C stops the answer, /exit leaves."""
    settings = engine_settings(config, model=model, ctx_size=ctx_size, threads=threads, slots=1)
    talk = ChatSession(Sampling(temperature=temperature, seed=seed), max_tokens)
    talk.start_over(system or "")
    asyncio.run(_chat(settings, talk, ctx.obj))


@dataclass
class ChatSession:
    """The messages so far and how the next answer is drawn."""

    sampling: Sampling
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def start_over(self, system: str) -> None:
        """Forget everything; begin with `system` if it is not empty."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def restart(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def request(self, runtime: Runtime, text: str) -> GenerateRequest:
        """The request that asks for an answer to `text`."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return GenerateRequest(
            prompt=runtime.render_chat(messages),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            is_chat=True,
            return_progress=True,
        )

    def add(self, text: str, answer: ReplyText) -> None:
        """Keep an exchange; of an answer that was stopped, what there is of it."""
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer.text.strip()},
        ]


async def _chat(settings: EngineSettings, talk: ChatSession, factory: RuntimeFactory | None) -> None:
    async with opened(settings, factory) as runtime:
        reader = new_reader()
        typer.secho(f"{runtime.resolve(None).id}: /help says what can be done", err=True, dim=True)
        while await _turn(runtime, talk, reader):
            pass


async def _turn(runtime: Runtime, talk: ChatSession, reader: LineReader) -> bool:
    """One line of the user's; False when it was the last."""
    try:
        line = (await reader.read()).strip()
    except EOFError:
        return False
    command, _, rest = line.partition(" ")
    match command:
        case "/exit" | "/quit":
            return False
        case "/clear":
            talk.restart()
        case "/system":
            talk.start_over(rest.strip())
        case "/help":
            typer.echo(HELP, err=True)
        case _ if command.startswith("/"):
            typer.echo(f"stoker: there is no command {command}; /help lists them", err=True)
        case _ if line:
            await _answer(runtime, talk, line)
    return True


async def _answer(runtime: Runtime, talk: ChatSession, text: str) -> None:
    """Write an answer; an error or Ctrl-C ends it and leaves the conversation usable."""
    answer = ReplyText()
    try:
        writing = asyncio.ensure_future(write_answer(runtime, talk.request(runtime, text), answer))
        with _Interruptible(writing):
            await asyncio.wait([writing])
        if not writing.cancelled():
            writing.result()
        talk.add(text, answer)
    except ContextLengthError as error:
        typer.echo(f"stoker: {error.message}; /clear starts over", err=True)
    except StokerError as error:
        typer.echo(f"stoker: {error.message}", err=True)


class _Interruptible:
    """While entered, Ctrl-C cancels the task instead of ending the program."""

    def __init__(self, task: asyncio.Future[None]) -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        self._loop.add_signal_handler(signal.SIGINT, self._task.cancel)

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._before)


class LineReader(Protocol):
    """Something that gives the user's next text."""

    async def read(self) -> str:
        """The next text. Raises EOFError when there is none."""
        ...


class TerminalReader:
    """An edited line: Enter sends, Alt-Enter makes a new line, Ctrl-C clears, Ctrl-D ends.

    Args:
        history: file that remembers what was sent; readable by its owner only.
    """

    def __init__(self, history: Path) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory

        make_folder(history.parent)
        history.touch(mode=0o600)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            history=FileHistory(str(history)),
            key_bindings=_bindings(),
            prompt_continuation=". ",
        )

    async def read(self) -> str:
        """The next text. Raises EOFError at Ctrl-D."""
        while True:
            try:
                text: str = await self._session.prompt_async()
            except KeyboardInterrupt:
                typer.secho("(/exit or Ctrl-D leaves)", err=True, dim=True)
            else:
                return text


class PipeReader:
    """Standard input, a line at a time."""

    async def read(self) -> str:
        """The next line. Raises EOFError at the end."""
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line


def new_reader() -> LineReader:
    """The reader that fits standard input."""
    if sys.stdin.isatty():
        return TerminalReader(platformdirs.user_data_path("stoker") / HISTORY_FILE)
    return PipeReader()


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
