"""A request: a prompt and what to make of it, validated once and immutable.

Names are those of llama-server and vLLM. The client makes requests of templates and HTTP bodies.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum

import msgspec

from stoker.errors import InvalidRequestError, QueueFullError
from stoker.ipc.constraint import Constraint

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 32
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 4096
MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_CANDIDATES = 256
MAX_CANDIDATE_CHARS = 2**20
"""Of all candidates together."""
MAX_ADAPTERS = 16
MAX_ADAPTER_SCALE = 100.0
IMAGE_MARKER = "<__media__>"
"""Where an image or a recording stands in a prompt's text."""
_SAMPLE_BYTES = 2


class Priority(StrEnum):
    """Class of a request (SPEC Q1)."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


def queue_bound(max_queue: int, priority: Priority) -> int:
    """How many requests of a model may wait when one of this class arrives: half as many for background."""
    return max_queue if priority is Priority.INTERACTIVE else max(1, max_queue // 2)


def check_queue(max_queue: int, priority: Priority, num_waiting: int, retry_after_s: float) -> None:
    """Raises QueueFullError when `num_waiting` requests are at the bound of the class (SPEC Q11)."""
    bound = queue_bound(max_queue, priority)
    if num_waiting >= bound:
        raise QueueFullError(
            f"{num_waiting} requests wait and {bound} may ({priority}); retry in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            num_waiting=num_waiting,
            max_queue=bound,
        )


class Preempt(StrEnum):
    """What becomes of a request when another needs its slot (SPEC Q4)."""

    PARK = "park"
    CANCEL = "cancel"


class StateOutput(StrEnum):
    """What is delivered of the model's state after the prompt (SPEC K5, D8)."""

    SAVE = "save"
    EMBED = "embed"
    SCORE = "score"
    CHOOSE = "choose"


class FinishReason(StrEnum):
    """Why a completion ended (SPEC D4)."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    ERROR = "error"


_MAX_SHOWN_BITS = 64  # writing a number takes time that grows with the square of its length


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequestError, with the field and the range, where the value is outside of it."""
    if not (low <= value <= high and math.isfinite(value)):
        text = f"{name} must be between {_shown(low)} and {_shown(high)}, got {_shown(value)}"
        raise InvalidRequestError(text, param=name)


def _shown(value: float) -> str:
    """Whole numbers with all their digits, others with six."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, int) else f"{value:g}"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn (SPEC D1). Defaults are llama.cpp's.

    `temperature` 0 is greedy. For `seed` None the client picks one, so that a replay draws the same.
    The penalties look back over `repeat_last_n` tokens (-1: all, 0: off); DRY over `dry_penalty_last_n`.
    `top_n_sigma` keeps logits within so many standard deviations of the largest (0 and below: off). With a
    `dynatemp_range` the temperature goes up to that far from `temperature`, by the candidates' entropy.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("dynatemp_range", self.dynatemp_range, 0.0, 100.0)
        check_range("dynatemp_exponent", self.dynatemp_exponent, 0.0, 100.0)
        check_range("top_n_sigma", self.top_n_sigma, -1.0, 100.0)
        check_range("top_k", self.top_k, -1, 2**31 - 1)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        check_range("mirostat", self.mirostat, 0, 2)
        check_range("mirostat_tau", self.mirostat_tau, 0.0, 100.0)
        check_range("mirostat_eta", self.mirostat_eta, 0.0, 1.0)
        check_range("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        check_range("dry_base", self.dry_base, 0.0, 100.0)
        check_range("dry_allowed_length", self.dry_allowed_length, 0, 2**31 - 1)
        check_range("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1)
        check_range("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
        check_range("repeat_last_n", self.repeat_last_n, -1, 2**31 - 1)
        check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS}", param="logit_bias"
            )
        if any(math.isnan(bias) for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias holds a value that is not a number", param="logit_bias")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidRequestError("seed must fit in 64 bits", param="seed")


class Picture(msgspec.Struct, frozen=True, tag="picture"):
    """An image for the model, which the client has decoded, turned upright and shrunk.

    Attributes:
        width, height: in pixels.
        rgb: one byte a channel, rows from the top; `width * height * 3` bytes.
    """

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        if len(self.rgb) != self.width * self.height * 3 or not self.rgb:
            raise InvalidRequestError(
                f"{len(self.rgb)} bytes are no picture of {self.width} x {self.height} pixels", param="image"
            )

    @property
    def content(self) -> bytes:
        """Digest of size and pixels (SPEC C11)."""
        head = f"{self.width}x{self.height}:".encode()
        return hashlib.blake2b(head + self.rgb, digest_size=32).digest()


class Sound(msgspec.Struct, frozen=True, tag="sound"):
    """A recording for the model, which the client has decoded, mixed to one channel and resampled (SPEC V9).

    Attributes:
        rate_hz: samples a second; that at which the model hears.
        pcm: signed 16-bit little-endian samples.
    """

    rate_hz: int
    pcm: bytes

    def __post_init__(self) -> None:
        if self.rate_hz <= 0 or not self.pcm or len(self.pcm) % _SAMPLE_BYTES:
            text = f"{len(self.pcm)} bytes are no recording of 16-bit samples at {self.rate_hz} Hz"
            raise InvalidRequestError(text, param="audio")

    @property
    def num_samples(self) -> int:
        """Of its one channel."""
        return len(self.pcm) // _SAMPLE_BYTES

    @property
    def duration_s(self) -> float:
        """How long it is."""
        return self.num_samples / self.rate_hz

    @property
    def content(self) -> bytes:
        """Digest of rate and samples (SPEC C11)."""
        head = f"{self.rate_hz} Hz:".encode()
        return hashlib.blake2b(head + self.pcm, digest_size=32).digest()


Medium = Picture | Sound
"""What a projector makes embeddings of."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what to make of it.

    Attributes:
        prompt: text, or token ids taken as they are.
        model: id of a served model; "default" is the first one served.
        max_tokens: tokens to generate at most, per choice; None: the setting `default_max_tokens`; 0: none.
        is_chat: the prompt comes from a chat template and holds its own special tokens; only a BOS that the
            vocabulary adds to every text is added where the template wrote none.
        n: completions of the one prompt; they share its prefill (SPEC Q16). Choice i draws with seed + i.
        logprobs: alternatives to report for each generated token (0: the chosen one only); None: off.
        prompt_logprobs: the same for each prompt token (SPEC D6); None: off.
        echo: deliver the prompt's text before the completion.
        preempt: `park` keeps what was computed and goes on later in the same stream; `cancel` ends the
            request with `preempted`; its partial text stands.
        timeout_s: seconds from submission after which the request ends with `request_timeout`.
        return_progress: ask for `PrefillProgress` events (SPEC S2).
        cache: reuse what was computed before, and keep this for later requests (SPEC C10).
        cache_salt: only requests of the same salt share what was computed (SPEC C1).
        context_shift: where the context is full, drop the oldest tokens after the first 100 and go on
            (SPEC C12), rather than end.
        initial_state: a recurrent model's state to begin from, as a safetensors file (SPEC K5); None: the
            model's own.
        state_output: deliver the state after the prompt; with `max_tokens` 0.
        keep_alive_s: of its model after it (SPEC R8); negative: for good; None: the model's own setting.
        constraint: what the text has to match as a whole (SPEC D2); None: nothing.
        spelled: control tokens that are part of the text, by their own text; others add nothing to it.
        speculate: guess tokens ahead where that is quicker (SPEC D9); the text is the same.
        adapters: LoRA adapters of the model, each by its name or its index, and its scale (SPEC K6); None: as
            set for it, 0: not at all.
        pictures: images and recordings, in the order of their markers, `IMAGE_MARKER`, in the prompt (SPEC
            V2, V9).
        note: the client's own, such as how the answer is to be read; the engine ignores it.
        document: what a reranker scores for the prompt, which is the query (SPEC K4); with `state_output`
            "score" only.
        candidates: texts to score as continuations of the prompt (SPEC D5); with `state_output` "choose"
            only.
        is_calibrated: score each candidate from the initial state as well.
    """

    prompt: str | tuple[int, ...]
    model: str = "default"
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    ignore_eos: bool = False
    is_chat: bool = False
    priority: Priority = Priority.INTERACTIVE
    preempt: Preempt = Preempt.PARK
    timeout_s: float | None = None
    return_progress: bool = False
    cache: bool = True
    cache_salt: str = ""
    context_shift: bool = False
    initial_state: bytes | None = None
    state_output: StateOutput | None = None
    keep_alive_s: float | None = None
    constraint: Constraint | None = None
    spelled: tuple[str, ...] = ()
    speculate: bool = True
    note: bytes = b""
    document: str | None = None
    pictures: tuple[Medium, ...] = ()
    adapters: tuple[tuple[str | int, float | None], ...] = ()
    candidates: tuple[str, ...] = ()
    is_calibrated: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        check_range("n", self.n, 1, MAX_CHOICES)
        if self.timeout_s is not None:
            check_range("timeout_s", self.timeout_s, 0.0, 86_400.0 * 365)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, 0, MAX_LOGPROBS)
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt has {len(self.cache_salt)} characters, at most {MAX_SALT_CHARS} are taken",
                param="cache_salt",
            )
        if self.state_output is not None and self.max_tokens != 0:
            raise InvalidRequestError("a state is delivered with max_tokens 0 only", param="max_tokens")
        self._check_document()
        self._check_candidates()
        self._check_adapters()
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings, at most {MAX_STOPS} are taken", param="stop"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters, 1 to {MAX_STOP_CHARS} are taken", param="stop"
                )

    def _check_adapters(self) -> None:
        if len(self.adapters) > MAX_ADAPTERS:
            raise InvalidRequestError(
                f"lora names {len(self.adapters)} adapters, at most {MAX_ADAPTERS} are taken", param="lora"
            )
        for _, scale in self.adapters:
            if scale is not None:
                check_range("lora", scale, -MAX_ADAPTER_SCALE, MAX_ADAPTER_SCALE)

    def _check_candidates(self) -> None:
        if not self.candidates and self.state_output is not StateOutput.CHOOSE:
            return
        if self.state_output is not StateOutput.CHOOSE or self.n != 1:
            raise InvalidRequestError("choices are scored, once, and nothing else is", param="choices")
        if not 0 < len(self.candidates) <= MAX_CANDIDATES:
            raise InvalidRequestError(
                f"{len(self.candidates)} choices; 1 to {MAX_CANDIDATES} are taken", param="choices"
            )
        if (num_chars := sum(map(len, self.candidates))) > MAX_CANDIDATE_CHARS:
            raise InvalidRequestError(
                f"the choices have {num_chars} characters, at most {MAX_CANDIDATE_CHARS} are taken",
                param="choices",
            )

    def _check_document(self) -> None:
        if (self.document is not None) != (self.state_output is StateOutput.SCORE):
            raise InvalidRequestError("a document is scored, and nothing else is", param="document")
        if self.document is not None and not isinstance(self.prompt, str):
            raise InvalidRequestError("a query is text, not token ids", param="prompt")
