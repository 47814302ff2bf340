"""`stoker chat`: a conversation in the terminal.

Owns the conversation and its commands. Ctrl-C ends the answer that is being written, not the program; what
was written stays part of the conversation. Reading a line is `stoker.cli.commands.reader`'s business.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

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
from stoker.errors import ContextLengthError, StokerError
from stoker.ipc.request import GenerateRequest, Sampling

if TYPE_CHECKING:
    from stoker.cli.commands.reader import LineReader
    from stoker.cli.options import RuntimeFactory
    from stoker.cli.session import ReplyText
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

HELP = """\
/system TEXT   start over with TEXT as the system message (without TEXT: none)
/clear         start over
/exit          leave (so does Ctrl-D)
Alt-Enter makes a new line, Enter sends, Ctrl-C stops an answer."""


def chat(
    *,
    ctx: typer.Context,
    model: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    seed: Seed = None,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Talk with a model; Ctrl-C stops the answer, /exit leaves."""
    models = [model] if model else None
    settings = engine_settings(config, models=models, ctx_size=ctx_size, threads=threads, slots=1)
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
    from stoker.cli.commands.reader import new_reader
    from stoker.cli.session import opened

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
    from stoker.cli.session import ReplyText, write_answer

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
