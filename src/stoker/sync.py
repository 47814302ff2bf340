"""The runtime for scripts without an event loop: the same names, plain iterators and plain returns.

Owns a thread with an event loop in it; everything else is `stoker.runtime`'s.

    with stoker.sync.Runtime() as runtime:
        for delta in runtime.generate("The capital of France is", max_tokens=16):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from stoker import runtime as asynchronous

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import ModelStatus
    from stoker.runtime import KeptRequest, Message, RuntimeEvent, RuntimeStatus, TextDelta
    from stoker.settings import EngineSettings
    from stoker.tasks.choose import Choices
    from stoker.tasks.embed import Text, TextEmbeddings
    from stoker.tasks.read_images import ImageLike, Reading
    from stoker.tasks.rerank import Ranking
    from stoker.tasks.states import Prompt, SavedState, StateEmbedding

T = TypeVar("T")


class Runtime:
    """See `stoker.runtime.Runtime`; may be used from several threads at once.

    Args:
        model: name or GGUF path of the default model.
        settings: the engine's.
        fields: single settings that differ, by name.

    Attributes:
        states: saved states of recurrent models, and embeddings by state.
    """

    def __init__(
        self, model: str | Path | None = None, *, settings: EngineSettings | None = None, **fields: Any
    ) -> None:
        self._runtime = asynchronous.Runtime(model, settings=settings, **fields)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.states = States(self._runtime, self._wait)

    def __repr__(self) -> str:
        return f"<sync {self._runtime!r}>"

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the engine; returns when every model is ready. Raises what `Runtime.start` raises."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stoker-front", daemon=True)
        self._thread.start()
        try:
            self._wait(self._runtime.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let running requests finish, end the rest, free everything. Idempotent."""
        if self._loop is None or self._thread is None:
            return
        self._wait(self._runtime.close())
        self._wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

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

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("the runtime is not running; use it in a `with` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------ questions

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._runtime.is_ready

    @property
    def models(self) -> list[ModelInfo]:
        """Every served model, the default first."""
        return self._runtime.models

    @property
    def on_load(self) -> Callable[[ModelState], None]:
        """Called, on the runtime's thread, with each state a model reports; set it before `start`."""
        return self._runtime.on_load

    @on_load.setter
    def on_load(self, hook: Callable[[ModelState], None]) -> None:
        self._runtime.on_load = hook

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name; None and "default" mean the first."""
        return self._runtime.resolve(model)

    def status(self) -> RuntimeStatus:
        """The engine and everything it holds now."""
        return self._wait(self._runtime.status())

    def stats(self) -> dict[str, int]:
        """What this side of the engine holds now."""
        return self._runtime.stats()

    # ------------------------------------------------------------ generation

    def generate(self, prompt: str | Sequence[int] | GenerateRequest, **fields: Any) -> Iterator[TextDelta]:
        """Continue a prompt. Leaving the iteration cancels the request."""
        return self._iterate(self._runtime.generate(prompt, **fields))

    def chat(
        self, messages: Sequence[Message], *, template_args: Mapping[str, Any] | None = None, **fields: Any
    ) -> Iterator[TextDelta]:
        """Answer a conversation, with `tools` if need be. Leaving the iteration cancels the request."""
        return self._iterate(self._runtime.chat(messages, template_args=template_args, **fields))

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        steps = _Steps(items)
        try:
            while (found := self._wait(steps.next())) is not None:
                yield found[0]
        finally:
            if self._loop is not None:
                self._wait(steps.leave())

    def cancel(self, request_id: str) -> None:
        """End a live request; its iteration finishes with `cancelled`."""
        self._wait(self._runtime.cancel(request_id))

    def pause_request(self, request_id: str) -> None:
        """Let a live request stand still until `resume_request`."""
        self._wait(self._runtime.pause_request(request_id))

    def resume_request(self, request_id: str) -> None:
        """Let a paused request go on where it stood."""
        self._wait(self._runtime.resume_request(request_id))

    # ------------------------------------------------------------ models and sleep

    def load_model(self, model: str, **fields: Any) -> ModelInfo:
        """Serve a model and load it; `keep_alive_s`, `n_ctx` and `num_slots` may differ from what is set."""
        return self._wait(self._runtime.load_model(model, **fields))

    def unload_model(self, model: str) -> None:
        """Free a served model; the next request for it loads it again."""
        self._wait(self._runtime.unload_model(model))

    def pin_model(self, model: str, *, is_pinned: bool = True) -> None:
        """Never unload a model to make room, or no longer so."""
        self._wait(self._runtime.pin_model(model, is_pinned=is_pinned))

    def model_states(self) -> list[ModelStatus]:
        """Every served model and download as it was last heard of."""
        return self._wait(self._at_once(self._runtime.model_states))

    @property
    def is_suspended(self) -> bool:
        """Whether the engine is away, or leaving, and every request waits for `resume`."""
        return self._runtime.is_suspended

    def suspend(self, reason: str = "sleep", *, grace_s: float | None = None) -> None:
        """Save what was computed, free everything, keep every request."""
        self._wait(self._runtime.suspend(reason, grace_s=grace_s))

    def resume(self) -> None:
        """Load what was loaded and let every request go on."""
        self._wait(self._runtime.resume())

    def kept(self) -> list[KeptRequest]:
        """Requests of a former program that have no client here."""
        return self._wait(self._at_once(self._runtime.kept))

    def attach(self, request_id: str, *, owner: str = "") -> Iterator[StreamEvent]:
        """The stream of a kept request from its first delta on; leaving it does not end the request."""
        return self._iterate(self._runtime.attach(request_id, owner=owner))

    def events(self) -> Iterator[RuntimeEvent]:
        """What happens from now on; the first is a snapshot."""
        return self._iterate(self._runtime.events())

    @staticmethod
    async def _at_once(question: Callable[[], T]) -> T:
        """Asked on the runtime's thread, which alone changes the answer."""
        return question()

    # ------------------------------------------------------------ text

    def embed(self, inputs: Text | Sequence[Text], **fields: Any) -> TextEmbeddings:
        """See `stoker.Runtime.embed`."""
        return self._wait(self._runtime.embed(inputs, **fields))

    def read(self, images: ImageLike | Sequence[ImageLike], **fields: Any) -> Reading:
        """See `stoker.Runtime.read`."""
        return self._wait(self._runtime.read(images, **fields))

    def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> Ranking:
        """See `stoker.Runtime.rerank`."""
        return self._wait(self._runtime.rerank(query, documents, **fields))

    def choose(self, prompt: str | Sequence[int], choices: Sequence[str], **fields: Any) -> Choices:
        """See `stoker.Runtime.choose`."""
        return self._wait(self._runtime.choose(prompt, choices, **fields))

    def tokenize(
        self, text: str, model: str = "default", *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[list[int], list[bytes]]:
        """Token ids of `text` and the bytes of each."""
        return self._wait(
            self._runtime.tokenize(text, model, add_special=add_special, parse_special=parse_special)
        )

    def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """The text of token ids."""
        return self._wait(self._runtime.detokenize(tokens, model))

    def render_chat(self, messages: Sequence[Message], model: str = "default", **template_args: Any) -> str:
        """The prompt that a conversation becomes."""
        return self._runtime.render_chat(messages, model, **template_args)


class States:
    """See `stoker.tasks.states.States`; the same names and errors."""

    def __init__(
        self, runtime: asynchronous.Runtime, wait: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._states = runtime.states
        self._wait = wait

    def __repr__(self) -> str:
        return f"<sync {self._states!r}>"

    def save(self, prompt: Prompt | GenerateRequest, *, name: str | None = None, **fields: Any) -> SavedState:
        """Let a recurrent model read a prompt and keep its state."""
        saved: SavedState = self._wait(self._states.save(prompt, name=name, **fields))
        return saved

    def embed(self, prompt: Prompt | GenerateRequest, **fields: Any) -> StateEmbedding:
        """The recurrent state after a prompt, or the last hidden state where a model has none."""
        embedding: StateEmbedding = self._wait(self._states.embed(prompt, **fields))
        return embedding

    def put(self, state: Path | bytes, *, model: str = "default", name: str | None = None) -> SavedState:
        """Keep a safetensors file for a recurrent model."""
        saved: SavedState = self._wait(self._states.put(state, model=model, name=name))
        return saved

    def list(self) -> Sequence[SavedState]:
        """Every saved state, the newest first."""
        found: Sequence[SavedState] = self._wait(self._states.list())
        return found

    def get(self, state_id: str) -> SavedState:
        """One of them."""
        found: SavedState = self._wait(self._states.get(state_id))
        return found

    def content(self, state_id: str) -> bytes:
        """Its safetensors file."""
        data: bytes = self._wait(self._states.content(state_id))
        return data

    def delete(self, state_id: str) -> None:
        """Forget one."""
        self._wait(self._states.delete(state_id))


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
