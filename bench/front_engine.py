"""An engine that computes nothing: `python -m bench.front_engine FD SETTINGS_JSON LOG_LEVEL`.

It speaks the real messages and gives every live request one token a step, at a rate that the environment
sets. What is left of a token's cost is what the process in front of an engine pays.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from stoker.engine import process
from stoker.engine.inbox import Closed
from stoker.ipc.commands import Cancel, GetStatus, LoadModel, Shutdown, Submit, Suspend
from stoker.ipc.events import (
    Admitted,
    Delta,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    ModelState,
    Queued,
    Reply,
)
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason
from stoker.ipc.status import EngineStatus
from stoker.ipc.usage import Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.engine.inbox import Inbox, Item
    from stoker.ipc.engine_config import EngineConfig
    from stoker.ipc.events import Event

STEPS = "BENCH_FRONT_STEPS"
"""Environment: steps a second; each gives every live request a token."""
PROMPT_TOKENS = 8
N_CTX = 4096
LONGEST_LAG_S = 0.05
"""Behind by more than this, the engine forgets what it owes: a burst is no load that an engine makes."""


class CostlessEngine:
    """Answers every request with words of no meaning.

    Args:
        inbox: where commands arrive.
        publish: sends one frame of events.
        config: of the engine; the slots of each model come with its load.
    """

    def __init__(self, inbox: Inbox, publish: Callable[[list[Event]], None], config: EngineConfig) -> None:
        del config
        self._inbox = inbox
        self._publish = publish
        self._step_s = 1.0 / float(os.environ[STEPS])
        self._live: dict[str, list[int]] = {}  # tokens given, tokens wanted
        self._due_s = 0.0
        self._is_open = True

    def heartbeat(self) -> Heartbeat:
        """No step takes any time."""
        return Heartbeat(step_s=0.0, step_limit_s=1.0)

    def run(self) -> None:
        """Serve until told to stop."""
        self._publish([Hello(os.getpid())])
        while self._is_open:
            for item in self._inbox.take(self._wait_s()):
                self._handle(item)
            if self._live and time.perf_counter() >= self._due_s:
                self._step()
        self._publish([Goodbye()])

    def _wait_s(self) -> float | None:
        """Seconds to the next step; None: there is nobody to compute for."""
        return max(0.0, self._due_s - time.perf_counter()) if self._live else None

    def _handle(self, item: Item) -> None:
        match item:
            case LoadModel(spec=spec, ask_id=ask_id):
                info = ModelInfo(
                    id=spec.id,
                    path=spec.path,
                    n_ctx=N_CTX,
                    n_batch=spec.call_tokens,
                    num_slots=spec.num_slots,
                    num_threads=1,
                    kv_type="f16",
                    n_vocab=N_CTX,
                    model_class="decoder",
                    vocabulary_sample=spec.id,  # without one a gate asks for it with every request
                )
                self._publish([ModelState(model=spec.id, state="ready", info=info, answers=ask_id)])
            case Submit(request_id=request_id):
                self._live[request_id] = [0, item.request.max_tokens or 1]
                self._publish(
                    [Queued(request_id, 0), Admitted(request_id, prompt_tokens=PROMPT_TOKENS, num_context=1)]
                )
            case Cancel(request_id):
                self._live.pop(request_id, None)
            case GetStatus(call_id):
                status = EngineStatus(
                    slots=[], queue=[], parked=[], counters={}, kv_cells_total=1, kv_cells_used=0
                )
                self._publish([Reply(call_id=call_id, value={"status": status})])
            case Shutdown() | Suspend() | Closed.CLOSED:
                self._is_open = False

    def _step(self) -> None:
        """One token for everybody, in one frame."""
        now = time.perf_counter()
        self._due_s = max(self._due_s, now - LONGEST_LAG_S) + self._step_s
        events: list[Event] = []
        for request_id, counts in list(self._live.items()):
            counts[0] += 1
            is_last = counts[0] == counts[1]
            reason = FinishReason.LENGTH if is_last else None
            word = f" w{counts[0] % 100:02}"
            events.append(
                Delta(request_id=request_id, index=0, text=word, token_ids=[counts[0]], finish_reason=reason)
            )
            if is_last:
                del self._live[request_id]
                usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=counts[0])
                events.append(Finished(request_id=request_id, usage=usage, timings=Timings()))
        self._publish(events)


if __name__ == "__main__":
    sys.exit(process.serve(sys.argv[1:], CostlessEngine))
