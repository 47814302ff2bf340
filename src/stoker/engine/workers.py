"""Slow work off the loop: tokenising requests, loading models, reading and writing prefix files.

Workers hold no state of the engine. They get values, and post values back to the inbox; the loop decides what
becomes of them. One thread each, so that requests reach the line in the order they arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.backends.fake import load as load_fake
from stoker.backends.llama import load as load_llama
from stoker.backends.protocol import Vocabulary
from stoker.engine.inbox import Inbox, Loaded, LoadFailed, LoadMoved, Posted, Prepared, PrepareFailed
from stoker.engine.preparation import PrepContext, check_tokens, prepare
from stoker.errors import EngineError, StokerError
from stoker.messages import Detokenize, Reply, Submit, Tokenize
from stoker.values import ModelSpec

FAKE_PREFIX = "fake:"


class Workers:
    """The prep and loader threads."""

    def __init__(self, inbox: Inbox, cache_dir: Path) -> None:
        self._inbox = inbox
        self._cache_dir = cache_dir
        self._prep = ThreadPoolExecutor(1, thread_name_prefix="stoker-prep")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="stoker-loader")

    def __repr__(self) -> str:
        return "<Workers prep, loader>"

    def prepare(self, submit: Submit, context: PrepContext, arrival_s: float) -> None:
        """Tokenise a request; posts Prepared or PrepareFailed."""

        def failed(error: StokerError) -> Posted:
            return PrepareFailed(submit.request_id, error)

        self._post(self._prep, lambda: Prepared(prepare(submit, context, arrival_s)), failed)

    def tokenize(self, ask: Tokenize, vocabulary: Vocabulary) -> None:
        """Answer a Tokenize command; posts Reply."""

        def answer() -> Reply:
            tokens = vocabulary.tokenize(
                ask.text, add_special=ask.add_special, parse_special=ask.parse_special
            )
            pieces = [vocabulary.special_piece(token) for token in tokens]
            return Reply(call_id=ask.call_id, value={"tokens": tokens, "pieces": pieces})

        self._post(self._prep, answer, lambda error: Reply(call_id=ask.call_id, error=error.info()))

    def detokenize(self, ask: Detokenize, context: PrepContext) -> None:
        """Answer a Detokenize command; posts Reply."""

        def answer() -> Reply:
            check_tokens(ask.tokens, context.n_vocab, "tokens")
            text = b"".join(map(context.vocabulary.special_piece, ask.tokens)).decode("utf-8", "replace")
            return Reply(call_id=ask.call_id, value={"text": text})

        self._post(self._prep, answer, lambda error: Reply(call_id=ask.call_id, error=error.info()))

    def load(self, spec: ModelSpec) -> None:
        """Load a model; posts LoadMoved on the way, then Loaded or LoadFailed."""

        def moved(fraction: float) -> None:
            self._inbox.put(LoadMoved(spec.id, "weights", fraction))

        def answer() -> Loaded:
            if spec.path.startswith(FAKE_PREFIX):
                return Loaded(spec, load_fake(spec, moved))
            return Loaded(spec, load_llama(spec, moved, self._cache_dir))

        self._post(self._loader, answer, lambda error: LoadFailed(spec.id, error))

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        self._prep.shutdown(cancel_futures=True)
        self._loader.shutdown(cancel_futures=True)

    def _post(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[], Posted],
        failed: Callable[[StokerError], Posted],
    ) -> None:
        def run() -> None:
            try:
                self._inbox.put(work())
            except StokerError as error:
                self._inbox.put(failed(error))
            except Exception as error:  # noqa: BLE001 - a worker's bug must end one request, not the loop
                self._inbox.put(failed(EngineError(f"{type(error).__name__}: {error}")))

        pool.submit(run)
