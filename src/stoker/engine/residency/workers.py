"""Slow work off the loop: tokenising requests, loading models, reading and writing prefix files.

Workers hold no state of the engine. They get values, and post values back to the inbox; the loop decides what
becomes of them. How requests are prepared beside each other is `preparations`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker.backends.device import HeldDevices
from stoker.backends.registry import OpenModels
from stoker.engine.inbox import (
    Inbox,
    Loaded,
    LoadFailed,
    LoadMoved,
    LoadStop,
    Posted,
    Prepared,
    PrepareFailed,
    Sized,
)
from stoker.engine.jobs.preparations import Preparation, Preparations
from stoker.engine.jobs.prepare import PrepContext, check_tokens, is_quick, prepare, prompt_tokens
from stoker.engine.jobs.sources import QUICK_CHARS, check_question
from stoker.errors import EngineError, NotReadyError, StokerError
from stoker.ipc.commands import CountTokens, Detokenize, Submit, TextQuestion, Tokenize
from stoker.ipc.events import Reply
from stoker.ipc.model import ModelSpec
from stoker.models.memory_estimate.fit import with_draft
from stoker.models.placement import with_device_ids
from stoker.models.reader import LoadContext

MAX_LOSSES = 2
TOLD_EVERY = 0.02
"""How much further a load has to come to be reported again: loaders report each of hundreds of tensors."""


class Workers:
    """The preparing threads, the loader's, and one that reads headers: a load may take its time.

    Args:
        inbox: where results are posted.
        cache_dir: results of smoke decodes.
        devices: takes the lease of what a model is loaded on.
        max_prepare_s: how long preparing one request may take.

    Attributes:
        lost: devices that have ended engines, and how often: at MAX_LOSSES one is left out.
    """

    def __init__(self, inbox: Inbox, cache_dir: Path, devices: HeldDevices, max_prepare_s: float) -> None:
        self._inbox = inbox
        self._cache_dir = cache_dir
        self._devices = devices
        self._models = OpenModels()
        self.lost: Mapping[str, int] = {}
        self.preparations = Preparations(inbox, max_prepare_s)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="stoker-loader")
        self._sizer = ThreadPoolExecutor(1, thread_name_prefix="stoker-sizer")

    def __repr__(self) -> str:
        return f"<Workers {self.preparations!r}, loader>"

    def prepare(self, submit: Submit, context: PrepContext, arrival_s: float) -> Preparation:
        """Tokenise a request; posts Prepared or PrepareFailed, unless it is given up."""

        def failed(error: StokerError) -> Posted:
            return PrepareFailed(submit.request_id, error, context)

        def work() -> Posted:
            return Prepared(prepare(submit, context, arrival_s), context)

        return self.preparations.begin(work, failed, context, is_quick=is_quick(submit.request, context))

    def answer(self, ask: TextQuestion, context: PrepContext) -> None:
        """Answer a question about text; posts Reply."""

        def work() -> Reply:
            return Reply(call_id=ask.call_id, value=_answer(ask, context))

        def failed(error: StokerError) -> Posted:
            return Reply(call_id=ask.call_id, error=error.info())

        self.preparations.begin(work, failed, context, is_quick=_size(ask) <= QUICK_CHARS)

    def size(self, load: LoadStop, spec: ModelSpec) -> None:
        """Estimate what a model's file takes; posts Sized or LoadFailed."""

        def answer() -> Sized:
            model = self._models.open(spec.path)
            there = [each for each in model.devices() if self.lost.get(each.id, 0) < MAX_LOSSES]
            self._devices.know(there)
            found = model.estimator()
            missing = tuple(sorted(self.lost.keys() - {each.id for each in there}))
            if spec.draft_path and spec.speculation.uses_model:
                found = with_draft(found, self._models.open(spec.draft_path).estimator())
            return Sized(load, found, model.fingerprint, with_device_ids(spec, there, missing), missing)

        self._post(self._sizer, answer, lambda error: LoadFailed(load, error))

    def load(self, load: LoadStop, spec: ModelSpec, *, is_suspect: bool = False) -> None:
        """Load a model; posts LoadMoved on the way, then Loaded or LoadFailed, soon where `load` is set.

        A suspect, whose last load ended an engine, is tried in a child process first.
        """
        next_fraction = 0.0

        def moved(fraction: float) -> None:
            nonlocal next_fraction
            if load.is_set():
                raise NotReadyError(f"the load of {spec.id} was stopped at {fraction:.0%}")
            if fraction >= min(1.0, next_fraction):
                next_fraction = fraction + TOLD_EVERY
                self._inbox.put(LoadMoved(load, "weights", fraction))

        def answer() -> Loaded:
            model, context = self._models.open(spec.path), LoadContext(moved, self._cache_dir)
            self._devices.take(model.devices_for(spec), spec.id)
            if is_suspect:
                model.try_out(spec, context)
            return Loaded(load, spec.path, model.load(spec, context))

        self._post(self._loader, answer, lambda error: LoadFailed(load, error))

    def close(self) -> None:
        """Drop what waits; wait for a load, and a little for what is being prepared."""
        self.preparations.close()
        self._sizer.shutdown(cancel_futures=True)
        self._loader.shutdown(cancel_futures=True)

    def _post(
        self, pool: ThreadPoolExecutor, work: Callable[[], Posted], failed: Callable[[StokerError], Posted]
    ) -> None:
        def run() -> None:
            try:
                self._inbox.put(work())
            except StokerError as error:
                self._inbox.put(failed(error))
            except Exception as error:  # noqa: BLE001 - a worker's bug must end one request, not the loop
                self._inbox.put(failed(EngineError(f"{type(error).__name__}: {error}")))

        pool.submit(run)


def _size(ask: TextQuestion) -> int:
    """Characters, or token ids, that it brings."""
    match ask:
        case Tokenize():
            return len(ask.text)
        case Detokenize():
            return len(ask.tokens)
        case CountTokens():
            return len(ask.request.prompt)


def _answer(ask: TextQuestion, context: PrepContext) -> dict[str, Any]:
    match ask:
        case Tokenize():
            return _tokens(ask, context)
        case Detokenize():
            return _text(ask, context)
        case CountTokens(_, _, request):
            check_question(num_chars=len(request.prompt), num_tokens=0)
            return {"num_tokens": len(prompt_tokens(request, context))}


def _tokens(ask: Tokenize, context: PrepContext) -> dict[str, Any]:
    check_question(num_chars=len(ask.text), num_tokens=0)
    vocabulary = context.vocabulary
    tokens = vocabulary.tokenize(ask.text, add_special=ask.add_special, parse_special=ask.parse_special)
    return {"tokens": tokens, "pieces": [vocabulary.special_piece(token) for token in tokens]}


def _text(ask: Detokenize, context: PrepContext) -> dict[str, Any]:
    check_question(num_chars=0, num_tokens=len(ask.tokens))
    check_tokens(ask.tokens, context.n_vocab, "tokens")
    pieces = map(context.vocabulary.special_piece, ask.tokens)
    return {"text": b"".join(pieces).decode("utf-8", "replace")}
