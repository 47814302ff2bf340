"""The course of a chat: a line is typed, a command is done or a turn answered, until the last line.

Owns what each command does and what becomes of an answer that is stopped or fails. What was said is
`session`'s, where lines come from and answers go to is the screen's.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol, Unpack

from stoker.audio import Audio
from stoker.cli.chat.commands import file_of, help_table, typed
from stoker.cli.chat.saving import save
from stoker.cli.chat.session import ChatReply, Exchange
from stoker.client.documents import num_chars_of
from stoker.documents import Document
from stoker.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, StokerError
from stoker.images.image import Image
from stoker.images.turns import require_hearing, require_vision
from stoker.ipc.events import Parked, Paused, PrefillProgress, Queued
from stoker.ipc.model import ModelClass
from stoker.wording import count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from stoker.cli.chat.session import Attachment, ChatSession
    from stoker.client.requests.stream import Notice, TextDelta
    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelInfo
    from stoker.tasks.fields import ConversationKeywords, Message

ATTACHING = {"/image": "image", "/audio": "recording", "/file": "document"}
"""Commands that let a file go with the next turn, and what each calls it."""
NO_TOOLS = "tools are off: a chat offers the model no functions and runs nothing that it asks for"
LONG_PROMPT_TOKENS = 256  # a shorter one is read before it can be said


class ChatScreen(Protocol):
    """Where lines come from and answers go to."""

    async def read(self) -> str:
        """The next line that was typed. Raises EOFError behind the last one."""
        ...

    def answering(self, task: asyncio.Future[None]) -> AbstractContextManager[None]:
        """While entered, Ctrl-C cancels the task instead of ending the program."""
        ...

    def wait(self, text: str) -> None:
        """Say what is waited for, in one line, until something comes; empty: nothing."""
        ...

    def think(self, text: str) -> None:
        """A piece of the model's reasoning."""
        ...

    def write(self, text: str) -> None:
        """A piece of the answer."""
        ...

    def end(self, reply: ChatReply) -> None:
        """The answer is over; `reply` holds it and its figures."""
        ...

    def say(self, content: RenderableType) -> None:
        """Something to the person at the terminal."""
        ...

    def fail(self, error: StokerError, advice: str = "") -> None:
        """A turn or a command has failed."""
        ...


class ChatRuntime(Protocol):
    """What a runtime has that answers a chat, here or at a server."""

    on_load: Callable[[ModelState], None]

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name."""
        ...

    def chat(
        self, messages: str | Sequence[Message], **fields: Unpack[ConversationKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation."""
        ...

    async def load_model(self, model: str) -> ModelInfo:
        """Serve a model and load it."""
        ...


class ChatLoop:
    """One chat.

    Args:
        runtime: started.
        session: what was said before.
        screen: of the chat.
        models: gives the names that /model takes.

    Attributes:
        num_failed: turns and commands that have failed.
    """

    def __init__(
        self,
        runtime: ChatRuntime,
        session: ChatSession,
        screen: ChatScreen,
        models: Callable[[], Sequence[str]],
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._screen = screen
        self._models = models
        self.num_failed = 0
        self._is_busy = False
        self._notes: list[str] = []
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/model": self._model,
            "/system": self._system,
            **{name: partial(self._attach, name) for name in ATTACHING},
            "/save": self._save,
            "/save!": self._replace,
            "/stats": self._stats,
            "/tools": self._tools,
            "/clear": self._clear,
            "/help": self._help,
        }

    def __repr__(self) -> str:
        return f"ChatLoop({len(self._session.exchanges)} exchanges)"

    async def run(self) -> None:
        """Until the last line, or /exit."""
        self._runtime.on_load = self._on_load
        while True:
            try:
                line = typed(await self._screen.read())
            except EOFError:
                return
            if line.command == "/exit":
                return
            if line.command == "/retry":
                await self._retry(line.text)
            elif line.command:
                await self._guarded(self._commands[line.command](line.text))
            elif line.text:
                if line.looks_mistyped:
                    self._screen.say("sent as text: it is no command; /help lists those there are")
                await self._turn(line.text)
            for note in self._notes:
                self._screen.say(note)
            self._notes.clear()

    def note(self, text: str) -> None:
        """Say something that has nothing to do with the conversation, never in the middle of an answer."""
        if self._is_busy:
            self._notes.append(text)
        else:
            self._screen.say(text)

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Do it until its end or Ctrl-C. What goes wrong is said, and the chat goes on."""
        task = asyncio.ensure_future(work)
        self._is_busy = True
        try:
            with self._screen.answering(task):
                await _ended(task)
            if not task.cancelled():
                task.result()
        except ContextLengthError as error:
            self._failed(error, "; /clear starts over")
        except StokerError as error:
            self._failed(error)
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            self._failed(InvalidRequestError(text))
        finally:
            self._is_busy = False

    def _failed(self, error: StokerError, advice: str = "") -> None:
        self.num_failed += 1
        self._screen.fail(error, advice)

    # ------------------------------------------------------------ answers

    async def _turn(self, text: str) -> None:
        """Answer a turn; one that fails is not part of the conversation, one that is stopped is."""
        session = self._session
        attached = tuple(session.attached)
        session.num_retries = 0
        await self._answered(text, attached)

    async def _retry(self, given: str) -> None:
        """Answer the last turn again; its former answer comes back if that fails."""
        session = self._session
        former = session.exchanges.pop() if session.exchanges and not session.failed else None
        asked = session.failed if former is None else (former.text, former.attached)
        if asked is None:
            self._screen.say("nothing has been asked yet")
            return
        session.num_retries += 1
        if not await self._answered(*asked, temperature=given) and former is not None:
            session.exchanges.append(former)
            session.failed = None

    async def _answered(self, text: str, attached: tuple[Attachment, ...], temperature: str = "") -> bool:
        """Whether an answer was kept, of which there may be a part only."""
        session, num_failed = self._session, self.num_failed
        reply = ChatReply("", max_tokens=session.fields.get("max_tokens"))
        await self._guarded(self._stream(text, attached, reply, temperature))
        has_failed = self.num_failed > num_failed
        if not has_failed:
            self._screen.end(reply)
        is_kept = not has_failed and (reply.finish_reason is not None or bool(reply.text))
        session.failed = None if is_kept else (text, attached)
        if is_kept:
            session.exchanges.append(Exchange(text, attached, reply))
            session.attached = [one for one in session.attached if one not in attached]
        return is_kept

    async def _stream(
        self, text: str, attached: tuple[Attachment, ...], reply: ChatReply, temperature: str
    ) -> None:
        fields = {**self._session.request_fields(), "return_progress": True, "on_notice": self._on_notice}
        if temperature:
            fields["temperature"] = _number(temperature)
        elif self._session.num_retries and fields.get("temperature") == 0:
            say = "temperature 0 gives the same answer again; another one comes with, say, /retry 0.8"
            raise InvalidRequestError(say, param="temperature")
        reply.model = self._info().id
        messages = self._session.messages(text, attached)
        async with aclosing(self._runtime.chat(messages, **fields)) as deltas:
            async for delta in deltas:
                reply.take(delta)
                if delta.reasoning:
                    self._screen.think(delta.reasoning)
                if delta.text:
                    self._screen.write(delta.text)

    def _info(self) -> ModelInfo:
        return self._runtime.resolve(self._session.model)

    def _on_notice(self, notice: Notice | PrefillProgress) -> None:
        """Say what the answer waits for."""
        match notice:
            case Queued(_, position, eta_s) if position > 0 or (eta_s or 0) >= 1:
                place = f"{position} before it in the queue" if position else "next in the queue"
                eta = "" if eta_s is None else f", about {duration_text(eta_s)} to go"
                self._screen.wait(f"waiting: {place}{eta}")
            case PrefillProgress() if notice.total >= LONG_PROMPT_TOKENS:
                cached = f", {notice.cached} of them cached" if notice.cached else ""
                text = f"reading the prompt: {notice.processed} of {notice.total} tokens{cached}"
                self._screen.wait(text)
            case Parked():
                self._screen.wait("makes room for another request")
            case Paused():
                self._screen.wait("paused")

    def _on_load(self, state: ModelState) -> None:
        """Say how far a model is, while somebody waits here; a server loads for others too."""
        if not self._is_busy:
            return
        if state.state in {"downloading", "loading"}:
            stage = f" ({state.stage})" if state.stage else ""
            self._screen.wait(f"{state.state} {state.model}{stage}: {100 * state.fraction:.0f} %")
        elif state.state == "ready":
            self._screen.wait("")

    # ------------------------------------------------------------ commands

    async def _model(self, name: str) -> None:
        current = self._info().id
        if not name:
            shown = [f"{'* ' if each == current else '  '}{each}" for each in self._models()]
            self._screen.say("\n".join(shown))
            return
        info = await self._runtime.load_model(name)
        if info.model_class == ModelClass.ENCODER:
            raise ModelNotFoundError(f"{info.id} is {info.class_text}: it answers nothing", param="model")
        self._session.model = info.id
        self._screen.say(f"{info.id} answers from now on, with {info.n_ctx} tokens of context")

    async def _system(self, text: str) -> None:
        session = self._session
        if not text:
            self._screen.say(f"system message: {session.system}" if session.system else "no system message")
            return
        session.system = "" if text == "-" else text
        what = "with another system message" if session.system else "without a system message"
        self._screen.say(f"started over {what}: {_forgotten(session.start_over())}")

    async def _clear(self, _: str) -> None:
        stays = "; the system message stays" if self._session.system else ""
        self._screen.say(_forgotten(self._session.start_over()) + stays)

    async def _attach(self, command: str, text: str) -> None:
        attached = self._session.attached
        if text:
            await self.attach(command, text)
        elif attached:
            self._screen.say(f"with the next turn: {', '.join(one.name for one in attached)}")
        else:
            what = ATTACHING[command]
            self._screen.say(f"no {what} goes with the next turn; {command} FILE attaches one")

    async def attach(self, command: str, text: str) -> None:
        """Let a file go with the next turn, as that command does.

        Raises:
            StokerError: the model or the file cannot.
        """
        file, info = file_of(text), self._info()
        match command:
            case "/audio":
                require_hearing(info, command)
                _, report = await asyncio.to_thread(Audio(file).sound, info.hears_hz)
                one: Attachment = Audio(file)
                size = f"{report.duration_s:.1f} seconds"
            case "/file":
                size = count_text(await num_chars_of(Document(file)), "character")
                one = Document(file)
            case _:
                require_vision(info, command)
                picture, _ = await asyncio.to_thread(Image(file).picture)
                one = Image(file)
                size = f"{picture.width} x {picture.height} pixels"
        self._session.attached.append(one)
        self._screen.say(f"{one.name} goes with the next turn, {size}")

    async def _save(self, name: str) -> None:
        self._write_file(name, may_replace=False)

    async def _replace(self, name: str) -> None:
        self._write_file(name, may_replace=True)

    def _write_file(self, name: str, *, may_replace: bool) -> None:
        if not name:
            raise InvalidRequestError("/save FILE: say where to, in FILE.md or FILE.json", param="file")
        if not self._session.exchanges:
            raise InvalidRequestError("there is nothing to save yet", param="file")
        file = file_of(name)
        save(self._session, file, may_replace=may_replace)
        number = len(self._session.exchanges)
        self._screen.say(f"{count_text(number, 'turn')} written to {file}")

    async def _stats(self, _: str) -> None:
        used, info = self._session.num_context_tokens, self._info()
        self._screen.say(f"{info.id}: {self._session.stats}; context: {used} of {info.n_ctx} tokens")

    async def _tools(self, _: str) -> None:
        self._screen.say(NO_TOOLS)

    async def _help(self, _: str) -> None:
        self._screen.say(help_table())


async def _ended(task: asyncio.Future[None]) -> None:
    """Until it has ended; it does not outlive who waits for it."""
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequestError(
            f"/retry [TEMPERATURE]: {text!r} is no number", param="temperature"
        ) from None


def _forgotten(number: int) -> str:
    return f"{count_text(number, 'turn')} forgotten"
