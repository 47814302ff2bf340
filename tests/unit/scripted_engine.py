"""A stand-in engine that speaks the real messages and does what each prompt's script says.

Runs in a thread or, as `python -m scripted_engine FD SETTINGS LOG_LEVEL`, as a real child process.
Token i of choice c is `100 * c + i` and reads "c:i "; a script is JSON in the prompt, see `Script`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from stoker.engine import process
from stoker.engine.inbox import Closed, Inbox
from stoker.errors import (
    InsufficientMemoryError,
    LoadCrashedError,
    ModelFileError,
    QueueFullError,
    RequestTimeoutError,
)
from stoker.ipc.commands import (
    Cancel,
    Detokenize,
    GetStatus,
    LoadModel,
    Pause,
    Resume,
    Shutdown,
    Submit,
    Suspend,
    Tokenize,
    UnloadModel,
)
from stoker.ipc.engine_config import EngineConfig
from stoker.ipc.events import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    ModelState,
    Paused,
    PromptEcho,
    Queued,
    Reply,
    Resumed,
)
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.status import EngineStatus
from stoker.ipc.usage import Timings, Usage

NUM_SLOTS = 8


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What one request makes the engine do.

    Attributes:
        pause_after: tokens delivered in one life of the engine, after which the request idles; None: all.
        die: signal name, "raise" (an exception) or "exit" (status 0 without a word).
        die_at: the token, counted over all lives, instead of which it dies.
        is_silent: it dies before saying that it was admitted.
        hang_at: the token instead of which the step never ends, in the first life that gets there.
        max_line: how many requests may be live before it is refused with `queue_full`.
        is_waiting: it gets no slot; it stays in the line until it is cancelled.
        is_deaf: the engine does not leave when it is told to.
    """

    pause_after: int | None = None
    die: str | None = None
    die_at: int = 0
    is_silent: bool = False
    hang_at: int | None = None
    max_line: int | None = None
    is_waiting: bool = False
    is_deaf: bool = False


def prompt(**script: object) -> str:
    """The prompt that carries a script."""
    return json.dumps(script)


def text_of(index: int, tokens: range | list[int]) -> str:
    """The text of choice `index` for token numbers `tokens`."""
    return "".join(f"{index}:{i} " for i in tokens)


class _Live:
    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.request = submit.request
        self.script = msgspec.json.decode(str(submit.request.prompt) or "{}", type=Script)
        self.counts = [len(tokens) for tokens in submit.generated] or [0] * self.request.n
        self.is_finished = list(submit.is_finished) or [False] * self.request.n
        self.since = time.monotonic() - submit.age_s
        self.num_now = 0
        self.is_paused = submit.is_paused

    @property
    def can_go_on(self) -> bool:
        if self.is_paused or self.script.is_waiting:
            return False
        return self.script.pause_after is None or self.num_now < self.script.pause_after

    def is_first_life(self) -> bool:
        return not any(self.submit.generated)


class ScriptedEngine:
    """Speaks the engine's messages; every live request draws a token a turn."""

    def __init__(self, inbox: Inbox, publish: Callable[[list[Event]], None], config: EngineConfig) -> None:
        self._inbox = inbox
        self._publish = publish
        self._live: dict[str, _Live] = {}
        self._models: list[str] = []
        self._is_open = True
        self._stuck_since: float | None = None

    def heartbeat(self) -> Heartbeat:
        """How long it has been stuck in a step."""
        since = self._stuck_since
        return Heartbeat(step_s=time.monotonic() - since if since else 0.0, step_limit_s=0.2)

    def run(self) -> None:
        """Serve until told to stop."""
        self._publish([Hello(os.getpid())])
        while self._is_open:
            is_busy = any(live.can_go_on for live in self._live.values())
            has_deadline = any(live.request.timeout_s is not None for live in self._live.values())
            for item in self._inbox.take(0 if is_busy else 0.05 if has_deadline else None):
                self._handle(item)
            for live in list(self._live.values()):
                self._turn(live)
        self._publish([Goodbye()])

    def _handle(self, item: object) -> None:
        match item:
            case LoadModel() | UnloadModel():
                self._model(item)
            case Suspend():
                self._leave()
            case Submit():
                self._submit(item)
            case Cancel() | Pause() | Resume():
                self._steer(item)
            case Tokenize() | Detokenize() | GetStatus():
                self._publish([Reply(call_id=item.call_id, value=self._answer(item))])
            case Shutdown() | Closed.CLOSED:
                for live in list(self._live.values()):
                    self._end(live, FinishReason.CANCELLED)
                self._is_open = False

    def _steer(self, command: Cancel | Pause | Resume) -> None:
        live = self._live.get(command.request_id)
        match command:
            case Cancel() if live:
                self._end(live, FinishReason.CANCELLED)
            case Pause(request_id) | Resume(request_id) if live:
                live.is_paused = isinstance(command, Pause)
                self._publish([Paused(request_id) if live.is_paused else Resumed(request_id)])

    def _model(self, command: LoadModel | UnloadModel) -> None:
        match command:
            case LoadModel(spec, _, is_suspect):
                path = "tried" if spec.path == "crash once" and is_suspect else spec.path
                self._load(command, path)
            case UnloadModel(model, ask_id):
                gone = ModelState(model=model, state="absent", answers=ask_id)
                self._publish([ModelState(model=model, state="unloading"), gone])

    @staticmethod
    def _answer(question: Tokenize | Detokenize | GetStatus) -> dict[str, object]:
        match question:
            case Tokenize():
                if question.text == "die":
                    os.kill(os.getpid(), signal.SIGSEGV)
                return {"tokens": [*map(ord, question.text)], "pieces": [c.encode() for c in question.text]}
            case Detokenize():
                return {"text": "".join(map(chr, question.tokens))}
        status = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=9, kv_cells_used=0)
        return {"status": status}

    def _leave(self) -> None:
        """Go without a terminal event, or where a script is deaf, not at all."""
        if any(live.script.is_deaf for live in self._live.values()):
            threading.Event().wait()
        self._publish([ModelState(model=model, state="absent") for model in self._models])
        self._is_open = False
        self._live.clear()

    def _load(self, command: LoadModel, path: str) -> None:
        model, ask_id = command.spec.id, command.ask_id
        if path == "large" and not command.may_evict:
            absent = ModelState(model=model, state="absent", reason="it does not fit", answers=ask_id)
            self._publish([absent])
            return
        self._publish([ModelState(model=model, state="loading", stage="weights")])
        if path == "slow":
            return
        if path == "refused":
            error = InsufficientMemoryError("no room", needed=2, free=1).info()
            self._publish([ModelState(model=model, state="failed", error=error, answers=ask_id)])
            return
        if path.startswith("crash"):
            os.write(2, b"scripted.cpp:1: ASSERT(false) failed\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        if path == "tried":
            error = LoadCrashedError("a trial died of SIGSEGV").info()
            self._publish([ModelState(model=model, state="failed", error=error, answers=ask_id)])
            return
        if path == "bad":
            error = ModelFileError("no such file").info()
            self._publish([ModelState(model=model, state="failed", error=error, answers=ask_id)])
            return
        self._models.append(model)
        info = model_info(model, path)
        self._publish([ModelState(model=model, state="ready", info=info, answers=ask_id)])

    def _submit(self, submit: Submit) -> None:
        live = _Live(submit)
        if live.script.max_line is not None and len(self._live) >= live.script.max_line:
            self._publish([Failed(submit.request_id, QueueFullError("the line is full").info())])
            return
        self._live[submit.request_id] = live
        if not live.script.is_silent:
            self._publish([Queued(submit.request_id, 0)])
            if live.is_paused:
                self._publish([Paused(submit.request_id)])
            elif not live.script.is_waiting:
                self._publish([Admitted(submit.request_id)])
        if live.request.echo:
            self._publish([PromptEcho(request_id=submit.request_id, text=str(live.request.prompt))])

    def _turn(self, live: _Live) -> None:
        if live.request.timeout_s is not None and time.monotonic() - live.since > live.request.timeout_s:
            error = RequestTimeoutError("too late").info()
            self._publish([Failed(live.submit.request_id, error)])
            del self._live[live.submit.request_id]
            return
        for index in range(live.request.n):
            if live.can_go_on and not live.is_finished[index]:
                self._token(live, index)
        if all(live.is_finished):
            self._finish(live)

    def _token(self, live: _Live, index: int) -> None:
        i = live.counts[index]
        if live.script.die and i >= live.script.die_at:
            self._die(live.script.die)
        if live.script.hang_at is not None and i >= live.script.hang_at and live.is_first_life():
            self._stuck_since = time.monotonic()
            threading.Event().wait()
        live.counts[index] += 1
        live.num_now += 1
        live.is_finished[index] = live.counts[index] >= (live.request.max_tokens or 0)
        delta = Delta(
            request_id=live.submit.request_id,
            index=index,
            text=text_of(index, [i]),
            token_ids=[100 * index + i],
            finish_reason=FinishReason.LENGTH if live.is_finished[index] else None,
            mirostat_mu=float(i),
        )
        self._publish([delta])

    def _die(self, how: str) -> None:
        if how == "raise":
            raise RuntimeError("scripted")
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.Signals[how])

    def _end(self, live: _Live, reason: FinishReason) -> None:
        for index in range(live.request.n):
            if not live.is_finished[index]:
                self._publish([Delta(request_id=live.submit.request_id, index=index, finish_reason=reason)])
        self._finish(live)

    def _finish(self, live: _Live) -> None:
        usage = Usage(prompt_tokens=1, completion_tokens=sum(live.counts))
        self._publish([Finished(request_id=live.submit.request_id, usage=usage, timings=Timings())])
        del self._live[live.submit.request_id]


def model_info(model: str, path: str) -> ModelInfo:
    """What the stand-in says of any model."""
    return ModelInfo(
        id=model,
        path=path,
        label="scripted",
        model_class="decoder",
        architecture="scripted",
        description="",
        num_params=0,
        size_bytes=0,
        n_vocab=1000,
        n_ctx=1000,
        n_ctx_train=1000,
        n_batch=1,
        num_slots=NUM_SLOTS,
        num_threads=1,
        kv_type="",
        flash_attention="",
        memory_bytes={},
    )


def request(*, max_tokens: int = 6, n: int = 1, echo: bool = False, **script: object) -> GenerateRequest:
    """A request for the model "m" with a script."""
    return GenerateRequest(prompt=prompt(**script), model="m", max_tokens=max_tokens, n=n, echo=echo)


if __name__ == "__main__":
    sys.exit(process.serve(sys.argv[1:], ScriptedEngine))
