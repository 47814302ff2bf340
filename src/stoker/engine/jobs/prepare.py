"""Turns a submitted request into a prepared job: tokens, sequences, sampling state; and answers questions.

Questions are of a vocabulary: a text's tokens, tokens' text. All of it runs on a lane's thread and touches
nothing of the engine's; what is wrong with a request shows here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stoker.backends.protocol.backend import Conditioning, Vocabulary
from stoker.backends.protocol.scoring import ScoringLane
from stoker.backends.protocol.vision import Vision
from stoker.cache.radix import DIGEST_BYTES, Namespace
from stoker.engine.jobs.candidates import ToScore, candidates_of, check_candidates
from stoker.engine.jobs.job import Job, JobChoice
from stoker.engine.jobs.prompts import (
    QUICK_CHARS,
    TextBound,
    check_question,
    check_source,
    most_tokens,
    pictured_prompt,
    refuse_unreadable,
    text_tokens,
)
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
    VocabularyMismatchError,
)
from stoker.grammar.compiler import GrammarCompiler
from stoker.ipc.commands import CountTokens, Detokenize, Submit, TextQuestion, Tokenize
from stoker.ipc.model import CacheMode
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Preempt, Priority, StateOutput
from stoker.ipc.usage import Tensor
from stoker.kv.context_shift import note_dropped, replayed
from stoker.kv.sequence import ImageSpan, Sequence, SequenceKey
from stoker.models.states.file import parse_state
from stoker.sampling.generation import Generation
from stoker.sampling.truncation import Workspace


@dataclass(frozen=True, slots=True)
class PrepContext:
    """What preparing for a model takes: its tokenizer, its limits, the loop's scratch space.

    Attributes:
        model: its id.
        fingerprint, state_layout: as in `Capabilities`.
        cache_mode: what is kept of its finished work.
        grammars: compiles constraints; None: it generates no text.
        scores_pairs: it is a reranker.
        vision: its projector; None: it takes no images.
        decoder_start: as in `Capabilities`; with it a prompt is a source.
        max_text_tokens: of a text that it reads at once; None: `n_ctx`.
        adapters: fingerprints of its LoRA adapters, by name.
        num_candidates: the largest logits of a row that it gives in place of the row; 0: it gives rows.
        vocabulary_sample: as in `ModelInfo`.
    """

    vocabulary: Vocabulary
    n_vocab: int
    n_ctx: int
    workspace: Workspace
    model: str = ""
    fingerprint: str = ""
    state_layout: tuple[tuple[str, tuple[int, ...]], ...] = ()
    cache_mode: CacheMode = CacheMode.BOTH
    grammars: GrammarCompiler | None = None
    scores_pairs: bool = False
    vision: Vision | None = None
    decoder_start: int | None = None
    max_text_tokens: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    num_candidates: int = 0
    vocabulary_sample: str = ""


def prepare(submit: Submit, context: PrepContext, arrival_s: float) -> Job:
    """Prepare a request: tokens, sequences, sampling state.

    Args:
        submit: the request, with what was delivered before a restart.
        context: of the model it asks for.
        arrival_s: when the caller submitted it, on the engine's clock.

    Raises:
        ContextLengthError: the prompt leaves no place for a token.
        InvalidRequestError: the prompt is empty or holds token ids the model does not have; the constraint
            does not compile.
        UnsupportedError: a document is to be scored by what is no reranker, or the model cannot give what is
            asked for.
        VocabularyMismatchError: it has tokens of another vocabulary.
    """
    request = submit.request
    _check_vocabulary(submit, context)
    _check_texts(request, context)
    prompt, pictures = _prompt(request, context)
    _check_length(request, prompt, context)
    scored = None
    if request.state_output is StateOutput.CHOOSE:
        scored = candidates_of(request, context.vocabulary, context.model)
        check_candidates(scored, len(prompt), context.n_ctx)
    initial, namespace = _initial_state(request, context), namespace_of(request, context)
    scoring_namespace = namespace if request.cache else secrets.token_bytes(DIGEST_BYTES)
    choices: dict[int, JobChoice] = {}
    leader: Sequence | None = None
    for index in range(request.n):
        if submit.is_finished and submit.is_finished[index]:
            continue
        choice = _choice(submit, index, prompt, context)
        choice.sequence.arrival_s, choice.sequence.images = arrival_s, pictures
        choice.sequence.namespace, choice.sequence.initial_state = namespace, initial
        choice.sequence.conditioning = msgspec.structs.replace(
            choice.sequence.conditioning, namespace=scoring_namespace
        )
        choice.sequence.leader, leader = leader, leader or choice.sequence
        choices[index] = choice
    return Job(
        submit,
        arrival_s,
        prompt=prompt,
        prompt_text=_prompt_text(request, prompt, context.vocabulary) if request.echo else "",
        choices=choices,
        num_dropped=_num_dropped(submit, prompt, context),
        past={i: list(submit.generated[i]) for i, done in enumerate(submit.is_finished) if done},
        mirostat_mu=dict(enumerate(submit.mirostat_mu)),
        to_score=scored,
        num_context=submit.num_context or _num_context(request, prompt, scored, context),
    )


def _check_vocabulary(submit: Submit, context: PrepContext) -> None:
    """Refuse to go on from tokens that mean something else here: another machine computed them."""
    if submit.vocabulary_sample not in {"", context.vocabulary_sample} and any(submit.generated):
        raise VocabularyMismatchError(
            f"{submit.request_id} has {sum(map(len, submit.generated))} tokens of a model {context.model!r}"
            f" with the vocabulary {submit.vocabulary_sample}; here that model has"
            f" {context.vocabulary_sample}: machines that go on with each other's requests have to serve the"
            " same file under one name",
            param="model",
        )


def is_quick(request: GenerateRequest, context: PrepContext) -> bool:
    """Whether preparing it takes some hundredths of a second at the most."""
    constraint, grammars = request.constraint, context.grammars
    is_compiled = constraint is None or grammars is None or grammars.has(constraint, request.cache_salt)
    texts = [request.prompt if isinstance(request.prompt, str) else "", request.document or ""]
    num_chars = sum(map(len, texts)) + sum(map(len, request.candidates))
    return is_compiled and num_chars <= QUICK_CHARS and not request.pictures


def answer(ask: TextQuestion, context: PrepContext) -> dict[str, Any]:
    """The answer to a question about text, as its reply carries it.

    Raises:
        InvalidRequestError: the text or the token ids are too many, or ids that the model does not have; the
            prompt to be counted is empty.
        UnsupportedError: the prompt holds what the model does not take.
    """
    match ask:
        case Tokenize():
            return _tokens(ask, context.vocabulary)
        case Detokenize():
            return _text(ask, context)
        case CountTokens(_, _, request):
            check_question(num_chars=len(request.prompt), num_tokens=0)
            return {"num_tokens": len(_prompt(request, context)[0])}


def is_quick_question(ask: TextQuestion) -> bool:
    """Whether answering it takes some hundredths of a second at the most."""
    match ask:
        case Tokenize():
            return len(ask.text) <= QUICK_CHARS
        case Detokenize():
            return len(ask.tokens) <= QUICK_CHARS
        case CountTokens():
            return len(ask.request.prompt) <= QUICK_CHARS


def _tokens(ask: Tokenize, vocabulary: Vocabulary) -> dict[str, Any]:
    check_question(num_chars=len(ask.text), num_tokens=0)
    tokens = vocabulary.tokenize(ask.text, add_special=ask.add_special, parse_special=True)
    return {"tokens": tokens, "pieces": [vocabulary.special_piece(token) for token in tokens]}


def _text(ask: Detokenize, context: PrepContext) -> dict[str, Any]:
    check_question(num_chars=0, num_tokens=len(ask.tokens))
    check_tokens(ask.tokens, context.n_vocab, "tokens")
    pieces = map(context.vocabulary.special_piece, ask.tokens)
    return {"text": b"".join(pieces).decode("utf-8", "replace")}


def _choice(submit: Submit, index: int, prompt: list[int], context: PrepContext) -> JobChoice:
    request = submit.request
    words = [token for token in prompt if token >= 0]  # nothing of an image is ever repeated
    source: list[int] = []
    if context.decoder_start is not None:
        source, prompt, words = prompt, [context.decoder_start], []
    key = (submit.request_id, index)
    generation = Generation(request, key, context.vocabulary, words, context.workspace)
    if request.constraint is not None and context.grammars is not None:
        generation.constrain(context.grammars.state(request.constraint, request.cache_salt))
    delivered = submit.generated[index] if submit.generated else []
    asks_all = request.prompt_logprobs is not None and index == 0
    if delivered:
        generation.replay(delivered, submit.mirostat_mu[index] if submit.mirostat_mu else None)
    sequence = Sequence(
        key=SequenceKey(*key),
        tokens=[*prompt, *delivered],
        num_prompt=len(prompt),
        shares=request.cache and context.cache_mode is not CacheMode.OFF and not source,
        priority=request.priority,
        num_wanted=request.max_tokens,
        ends_if_preempted=request.preempt is Preempt.CANCEL,
        is_to_embed=request.state_output is StateOutput.EMBED and not context.state_layout,
        wants_prompt_logits=asks_all,
        takes_candidates=not asks_all and _fits(generation.num_needed, context.num_candidates),
        conditioning=Conditioning(
            source=tuple(source),
            adapters=_adapters_of(request, context.adapters),
            asked=tuple(prompt) if asks_all else (),
            lane=_prompt_lane(request.priority),
        ),
    )
    if request.context_shift and len(sequence.tokens) >= context.n_ctx:
        tokens = replayed(prompt, delivered, context.n_ctx)
        note_dropped(sequence, len(sequence.tokens) - len(tokens), context.n_ctx)
        sequence.tokens = tokens
    return JobChoice(sequence, generation)


def _fits(num_needed: int | None, num_candidates: int) -> bool:
    return num_needed is not None and num_needed <= num_candidates


def _prompt_lane(priority: Priority) -> ScoringLane:
    return ScoringLane.BACKGROUND_PROMPTS if priority is Priority.BACKGROUND else ScoringLane.PROMPTS


def _num_dropped(submit: Submit, prompt: list[int], context: PrepContext) -> int:
    """Tokens that shifts of the context have dropped so far, over all choices, those that have ended too."""
    if not submit.request.context_shift:
        return 0
    delivered = submit.generated or [[]] * submit.request.n
    finished = submit.is_finished or [False] * submit.request.n
    num_dropped = 0
    for tokens, is_finished in zip(delivered, finished, strict=True):
        shifting = tokens[:-1] if is_finished else tokens  # after the last one nothing is to come
        num_dropped += len(prompt) + len(shifting) - len(replayed(prompt, shifting, context.n_ctx))
    return num_dropped


def _check_texts(request: GenerateRequest, context: PrepContext) -> None:
    """Refuse by its length what cannot fit, before it is tokenised."""
    n_ctx = context.n_ctx if context.max_text_tokens is None else context.max_text_tokens
    most, vocabulary = most_tokens(request, n_ctx), context.vocabulary
    if not isinstance(request.prompt, str):
        if len(request.prompt) > most:
            raise ContextLengthError.over("the prompt", len(request.prompt), n_ctx)
    elif request.document is not None:
        pair = TextBound(n_ctx, n_ctx, "the query with its document", "documents")
        pair.check((request.prompt, request.document), vocabulary)
    else:
        param = "prompt" if context.max_text_tokens is None else "input"
        TextBound(n_ctx, most, param=param).check(request.prompt.split(IMAGE_MARKER), vocabulary)
    for candidate in request.candidates:
        TextBound(n_ctx, n_ctx, "a choice", "choices").check((candidate,), vocabulary)


def _check_length(request: GenerateRequest, prompt: list[int], context: PrepContext) -> None:
    if context.decoder_start is not None:
        refuse_unreadable(request, context.model)
        check_source(prompt, context.n_ctx)
        return
    if len(prompt) < context.n_ctx:
        return
    if request.context_shift and request.prompt_logprobs is None and request.state_output is None:
        return
    raise ContextLengthError.over("the prompt without its answer", len(prompt), context.n_ctx)


def _num_context(
    request: GenerateRequest, prompt: list[int], scored: ToScore | None, context: PrepContext
) -> int:
    """Tokens of context that a choice of it may come to hold: prompt and answer, at most all there is."""
    if scored is not None:
        return len(prompt) + max(map(len, scored.texts), default=0)
    if context.max_text_tokens is not None:  # a text that is read at once, and nothing after it
        return len(prompt)
    if request.max_tokens is None:
        return context.n_ctx
    return min(context.n_ctx, len(prompt) + max(1, request.max_tokens))


def _initial_state(request: GenerateRequest, context: PrepContext) -> list[Tensor] | None:
    """The state to begin from (SPEC K5); a bad one is refused, never replaced by the model's own."""
    if request.initial_state is None:
        return None
    if not context.state_layout:
        raise InvalidRequestError(
            f"{context.model} is no recurrent model: it has no state to begin from", param="state"
        )
    return parse_state(request.initial_state, context.state_layout)


def namespace_of(request: GenerateRequest, context: PrepContext) -> bytes:
    """Digest of what may share what is computed for it (SPEC C1)."""
    given = request.initial_state
    state = "" if given is None else hashlib.blake2b(given, digest_size=32).hexdigest()
    adapter = _adapter_key(_adapters_of(request, context.adapters), context.adapters)
    return Namespace(context.fingerprint, adapter, initial_state=state, salt=request.cache_salt).digest


def _adapters_of(request: GenerateRequest, fingerprints: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """Name and scale of each, in the order of names.

    Args:
        request: as the client has sealed it.
        fingerprints: of the adapters that the model has, by name.

    Raises:
        InvalidRequestError: the model has no adapter of that name.
    """
    found = {}
    for name, scale in request.adapters:
        if not isinstance(name, str) or scale is None or name not in fingerprints:
            known = ", ".join(fingerprints) or "none"
            text = f"{request.model} has no adapter {name!r}; it has: {known}"
            raise InvalidRequestError(text, param="lora")
        found[name] = scale
    return tuple(sorted(found.items()))


def _adapter_key(adapters: tuple[tuple[str, float], ...], fingerprints: Mapping[str, str]) -> str:
    """Names, scales and files: what differs in one of them shares nothing (SPEC C1)."""
    return "\n".join(f"{name}={scale!r}:{fingerprints[name]}" for name, scale in adapters)


def _prompt(request: GenerateRequest, context: PrepContext) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Token ids of the prompt, and where images stand among them (SPEC V5)."""
    if context.vision is None:
        if request.pictures:
            text = f"{context.model} takes no pictures and no recordings: it has no projector (mmproj)"
            raise UnsupportedError(text, param="messages")
    elif request.pictures or (isinstance(request.prompt, str) and IMAGE_MARKER in request.prompt):
        return pictured_prompt(request, context.vocabulary, context.vision)
    return _prompt_tokens(request, context), ()


def _prompt_tokens(request: GenerateRequest, context: PrepContext) -> list[int]:
    vocabulary = context.vocabulary
    if request.document is not None:
        if not context.scores_pairs:
            raise UnsupportedError(f"{context.model} is no reranker: it scores no documents", param="model")
        tokens = vocabulary.pair(str(request.prompt), request.document)
    elif not isinstance(request.prompt, str):
        tokens = list(request.prompt)
        check_tokens(tokens, context.n_vocab, "prompt")
    else:
        is_chat = request.is_chat and context.decoder_start is None  # a source ends with EOS
        has_state = request.initial_state is not None
        tokens = text_tokens(request.prompt, vocabulary, is_chat=is_chat, has_state=has_state)
    if not tokens and vocabulary.bos_text:
        tokens = vocabulary.tokenize(vocabulary.bos_text, add_special=False, parse_special=True)
    if not tokens:
        raise InvalidRequestError("the prompt is empty and the model has no BOS token", param="prompt")
    return tokens


def _prompt_text(request: GenerateRequest, prompt: list[int], vocabulary: Vocabulary) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    return b"".join(map(vocabulary.special_piece, prompt)).decode("utf-8", "replace")


def check_tokens(tokens: list[int], n_vocab: int, param: str) -> None:
    """Raises InvalidRequestError for an id that the model does not have."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise InvalidRequestError(
                f"token id {token} is outside the vocabulary of {n_vocab} tokens", param=param
            )
