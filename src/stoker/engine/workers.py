"""Slow work off the loop: tokenising requests and loading models.

Workers hold no state. They get values, and post values back to the inbox; the loop decides what becomes of
them. One thread each, so that requests reach the line in the order they arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stoker.backends.fake import load as load_fake
from stoker.backends.llama import load as load_llama
from stoker.backends.protocol import Vocabulary
from stoker.decode.generation import Generation
from stoker.decode.workspace import Workspace
from stoker.engine.inbox import Inbox, Loaded, LoadFailed, LoadMoved, Posted, Prepared, PrepareFailed
from stoker.engine.live import Choice, LiveRequest
from stoker.errors import ContextLengthError, EngineError, InvalidRequestError, StokerError
from stoker.messages import Detokenize, ModelSpec, Reply, Submit, Tokenize
from stoker.request import GenerateRequest, Preempt
from stoker.scheduler.sequence import Sequence, SequenceKey

FAKE_PREFIX = "fake:"


@dataclass(frozen=True, slots=True)
class PrepContext:
    """What preparing for a model takes: its tokenizer, its limits, the loop's scratch space."""

    vocabulary: Vocabulary
    n_vocab: int
    n_ctx: int
    workspace: Workspace


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
            _check_tokens(ask.tokens, context.n_vocab, "tokens")
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


def prepare(submit: Submit, context: PrepContext, arrival_s: float) -> LiveRequest:
    """Turn a submitted request into a live one: tokens, sequences, decode state.

    Args:
        submit: the request, with what was delivered before a restart.
        context: of the model it asks for.
        arrival_s: when the caller submitted it, on the engine's clock.

    Raises:
        ContextLengthError: the prompt leaves no room for a token.
        InvalidRequestError: the prompt is empty or holds token ids the model does not have.
    """
    request = submit.request
    prompt = _prompt_tokens(request, context)
    if len(prompt) >= context.n_ctx:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, the context holds {context.n_ctx} (with the answer)",
            param="prompt",
            num_tokens=len(prompt),
            n_ctx=context.n_ctx,
        )
    choices: dict[int, Choice] = {}
    leader: Sequence | None = None
    for index in range(request.n):
        if submit.is_finished and submit.is_finished[index]:
            continue
        choice = _choice(submit, index, prompt, context)
        choice.sequence.arrival_s = arrival_s
        if request.timeout_s is not None:
            choice.sequence.deadline_s = arrival_s + request.timeout_s
        choice.sequence.leader, leader = leader, leader or choice.sequence
        choices[index] = choice
    return LiveRequest(
        request_id=submit.request_id,
        request=request,
        prompt=prompt,
        prompt_text=_prompt_text(request, prompt, context.vocabulary) if request.echo else "",
        choices=choices,
        arrival_s=arrival_s,
        num_generated=sum(len(tokens) for tokens in submit.generated),
    )


def arrival_of(submit: Submit) -> float:
    """When the caller submitted it, on this process's clock."""
    return time.monotonic() - submit.age_s


def _choice(submit: Submit, index: int, prompt: list[int], context: PrepContext) -> Choice:
    request = submit.request
    generation = Generation(request, index, context.vocabulary, prompt, context.workspace)
    delivered = submit.generated[index] if submit.generated else []
    if delivered:
        generation.replay(delivered, submit.mirostat_mu[index] if submit.mirostat_mu else None)
    sequence = Sequence(
        key=SequenceKey(submit.request_id, index),
        tokens=[*prompt, *delivered],
        num_prompt=len(prompt),
        priority=request.priority,
        num_wanted=request.max_tokens,
        ends_if_preempted=request.preempt is Preempt.CANCEL,
        wants_prompt_logits=request.prompt_logprobs is not None and index == 0,
    )
    return Choice(sequence, generation)


def _prompt_tokens(request: GenerateRequest, context: PrepContext) -> list[int]:
    vocabulary = context.vocabulary
    if not isinstance(request.prompt, str):
        tokens = list(request.prompt)
        _check_tokens(tokens, context.n_vocab, "prompt")
    else:
        tokens = vocabulary.tokenize(request.prompt, add_special=not request.is_chat, parse_special=True)
    if not tokens and vocabulary.bos_text:
        tokens = vocabulary.tokenize(vocabulary.bos_text, add_special=False, parse_special=True)
    if not tokens:
        raise InvalidRequestError("the prompt is empty and the model has no BOS token", param="prompt")
    return tokens


def _prompt_text(request: GenerateRequest, prompt: list[int], vocabulary: Vocabulary) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    return b"".join(map(vocabulary.special_piece, prompt)).decode("utf-8", "replace")


def _check_tokens(tokens: list[int], n_vocab: int, param: str) -> None:
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise InvalidRequestError(
                f"token id {token} is outside the vocabulary of {n_vocab} tokens", param=param
            )
