"""The runtime for scripts without an event loop: plain iterators and plain returns.

Owns a thread with an event loop in it. Every method is made of the one of the same name of `stoker.runtime`,
whose parameters, types and documentation it has. `ended`, `group` and `prepare_chat` are not here.

    with stoker.sync.Runtime() as runtime:
        for delta in runtime.generate("The capital of France is", max_tokens=16):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from stoker import runtime as asynchronous
from stoker.images.intake import Intake
from stoker.tasks import states as asynchronous_states
from stoker.tasks.functions import ToolLike

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelInfo
    from stoker.settings import EngineSettings

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


class _Loop:
    """The thread in which a runtime lives; it is shared by its `States`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stoker-runtime", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        assert self._loop is not None
        assert self._thread is not None
        self.wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._loop is not None

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns or raises, done in the thread."""
        if self._loop is None:
            work.close()
            raise RuntimeError("the runtime is not running; use it in a `with` block")
        working = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return working.result()
        except BaseException:  # Ctrl-C ends the work too; what has ended by itself is not touched
            working.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """The items of an async generator, which is closed when the iteration is left."""
        steps = _Steps(items)
        try:
            while (found := self.wait(steps.next())) is not None:
                yield found[0]
        finally:
            if self._loop is not None:
                self.wait(steps.leave())


class _Mirror(Generic[A]):
    """One object of the runtime, and the thread that it lives in."""

    def __init__(self, target: A, loop: _Loop) -> None:
        self._target = target
        self._loop = loop

    def __repr__(self) -> str:
        return f"<sync {self._target!r}>"


def _of(target: A, method: Callable[Concatenate[A, P], T]) -> Callable[P, T]:
    """The method of the same name of `target`, which a connected runtime has of its own."""
    found: Callable[P, T] = getattr(target, method.__name__)
    return found


def _waited(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Mirror[A], P], T]:
    """A method that waits for what the coroutine returns."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.wait(_of(self._target, method)(*args, **kwargs))

    return update_wrapper(call, method)


def _iterated(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[_Mirror[A], P], Iterator[T]]:
    """A method whose items come as they are made; leaving the iteration closes the generator."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._loop.iterate(_of(self._target, method)(*args, **kwargs))

    return update_wrapper(call, method)


def _direct(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[_Mirror[A], P], T]:
    """A method that any thread may call."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _of(self._target, method)(*args, **kwargs)

    return update_wrapper(call, method)


def _asked(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[_Mirror[A], P], T]:
    """A method that is called in the runtime's thread, which alone changes the answer."""

    def call(self: _Mirror[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def ask() -> T:
            return _of(self._target, method)(*args, **kwargs)

        return self._loop.wait(ask())

    return update_wrapper(call, method)


class States(_Mirror[asynchronous_states.States]):
    """See `stoker.tasks.states.States`; what takes a request is not here."""

    save = _waited(asynchronous_states.States.save)
    embed = _waited(asynchronous_states.States.embed)
    embed_all = _waited(asynchronous_states.States.embed_all)
    put = _waited(asynchronous_states.States.put)
    list = _waited(asynchronous_states.States.list)
    get = _waited(asynchronous_states.States.get)
    content = _waited(asynchronous_states.States.content)
    delete = _waited(asynchronous_states.States.delete)


class Images(_Mirror[Intake]):
    """See `stoker.images.intake.Intake`."""

    take = _waited(Intake.take)


class Runtime(_Mirror[asynchronous.Runtime]):
    """See `stoker.runtime.Runtime`; may be used from several threads at once.

    Args:
        model: name or GGUF path of the default model.
        settings: the engine's.
        allow_downloads: a model may be OWNER/REPO[:FILE] of the hub, which is downloaded if it is not here.
        fields: single settings that differ, by name.

    Attributes:
        states: saved states of recurrent models, and embeddings by state.
        images: takes in the images of requests that are made of a plan.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        settings: EngineSettings | None = None,
        allow_downloads: bool = False,
        **fields: Any,
    ) -> None:
        target = asynchronous.Runtime(model, settings=settings, allow_downloads=allow_downloads, **fields)
        self._mirror(target)

    @classmethod
    def connect(cls, url: str | None = None, *, api_key: str | None = None) -> Self:
        """The runtime of a running server; arguments and errors are those of `stoker.Runtime.connect`."""
        connected = cls.__new__(cls)
        target = asynchronous.Runtime.connect(url, api_key=api_key)
        connected._mirror(cast("asynchronous.Runtime", target))  # noqa: SLF001 - it has the same methods
        return connected

    def _mirror(self, target: asynchronous.Runtime) -> None:
        super().__init__(target, _Loop())
        self.states = States(target.states, self._loop)
        self.images = Images(target.images, self._loop)

    def start(self) -> None:
        """Start the engine; returns when every model is ready. Raises what `Runtime.start` raises."""
        self._loop.start()
        try:
            self._loop.wait(self._target.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let running requests finish, end the rest, free everything. Idempotent."""
        if self._loop.is_running:
            self._loop.wait(self._target.close())
            self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._target.is_ready

    @property
    def is_suspended(self) -> bool:
        """Whether the engine is away, or leaving, and every request waits for `resume`."""
        return self._target.is_suspended

    @property
    def models(self) -> list[ModelInfo]:
        """Every served model, the default first."""
        return self._target.models

    @property
    def on_load(self) -> Callable[[ModelState], None]:
        """Called, on the runtime's thread, with each state a model reports; set it before `start`."""
        return self._target.on_load

    @on_load.setter
    def on_load(self, hook: Callable[[ModelState], None]) -> None:
        self._target.on_load = hook

    health = _asked(asynchronous.Runtime.health)
    resolve = _direct(asynchronous.Runtime.resolve)
    status = _waited(asynchronous.Runtime.status)
    stats = _direct(asynchronous.Runtime.stats)

    load_model = _waited(asynchronous.Runtime.load_model)
    unload_model = _waited(asynchronous.Runtime.unload_model)
    pin_model = _waited(asynchronous.Runtime.pin_model)
    unpin_model = _waited(asynchronous.Runtime.unpin_model)
    model_states = _asked(asynchronous.Runtime.model_states)

    suspend = _waited(asynchronous.Runtime.suspend)
    resume = _waited(asynchronous.Runtime.resume)
    kept = _asked(asynchronous.Runtime.kept)
    with_client = _asked(asynchronous.Runtime.with_client)
    owner_of = _asked(asynchronous.Runtime.owner_of)
    attach = _iterated(asynchronous.Runtime.attach)
    events = _iterated(asynchronous.Runtime.events)

    stream = _iterated(asynchronous.Runtime.stream)
    generate = _iterated(asynchronous.Runtime.generate)
    chat = _iterated(asynchronous.Runtime.chat)
    ask = _waited(asynchronous.Runtime.ask)
    batch = _waited(asynchronous.Runtime.batch)
    run_tools = _waited(asynchronous.Runtime.run_tools)
    cancel = _waited(asynchronous.Runtime.cancel)
    pause_request = _waited(asynchronous.Runtime.pause_request)
    resume_request = _waited(asynchronous.Runtime.resume_request)

    embed = _waited(asynchronous.Runtime.embed)
    read = _waited(asynchronous.Runtime.read)
    rerank = _waited(asynchronous.Runtime.rerank)
    choose = _waited(asynchronous.Runtime.choose)
    tokenize = _waited(asynchronous.Runtime.tokenize)
    detokenize = _waited(asynchronous.Runtime.detokenize)
    count_tokens = _waited(asynchronous.Runtime.count_tokens)
    plan_chat = _direct(asynchronous.Runtime.plan_chat)

    def render_chat(
        self,
        messages: str | Sequence[asynchronous.Message],
        model: str = "default",
        *,
        tools: Sequence[ToolLike] | None = None,
        **template_args: Any,
    ) -> str:
        """The prompt that a conversation becomes, by the model's own template."""
        return self._target.render_chat(messages, model, tools=tools, **template_args)


class _Steps(Generic[T]):
    """An async generator taken item by item, that can be left in the middle of a wait (Ctrl-C)."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._pending: asyncio.Task[tuple[T] | None] | None = None

    async def next(self) -> tuple[T] | None:
        """The next item in a tuple of its own; None at the end."""
        self._pending = asyncio.create_task(self._take())
        return await asyncio.shield(self._pending)

    async def _take(self) -> tuple[T] | None:
        try:
            return (await anext(self._items),)
        except StopAsyncIteration:
            return None

    async def leave(self) -> None:
        """Give up what is awaited and close the generator."""
        if self._pending is not None and not self._pending.done():
            self._pending.cancel()
            await asyncio.wait({self._pending})
        await self._items.aclose()
