"""A model between client and engine: how it is to be loaded, what it is, its states and their moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

STORY_LENGTH = 16
"""Moves of a model that are remembered, for the message of an illegal one."""


class ModelClass(StrEnum):
    """Class of a model by its GGUF metadata (SPEC K1)."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"


STEPPED = frozenset((ModelClass.DECODER, ModelClass.RECURRENT, ModelClass.HYBRID))
"""Classes that generate step by step from tokens alone."""


class Pairing(StrEnum):
    """How a model stands with its projector (SPEC V1); NONE: it is no vision model.

    TEXT_ONLY: it was made to see or hear, and what serves it computes its text alone.
    """

    NONE = ""
    READY = "ready"
    NEEDS_PROJECTOR = "needs_projector"
    BROKEN = "broken"
    TEXT_ONLY = "text_only"


class Pooling(StrEnum):
    """How an encoder makes one vector of its tokens'; RANK: it has a classifier and scores (SPEC K4)."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


class ModelLife(StrEnum):
    """State of a served model (SPEC L1)."""

    ABSENT = "absent"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    SUSPENDED = "suspended"
    UNLOADING = "unloading"
    FAILED = "failed"


_L = ModelLife
MODEL_MOVES = {
    _L.ABSENT: frozenset({_L.DOWNLOADING, _L.LOADING, _L.FAILED}),
    _L.DOWNLOADING: frozenset({_L.LOADING, _L.ABSENT, _L.FAILED}),
    _L.LOADING: frozenset({_L.READY, _L.ABSENT, _L.SUSPENDED, _L.FAILED}),
    _L.READY: frozenset({_L.SUSPENDED, _L.UNLOADING, _L.FAILED}),
    _L.SUSPENDED: frozenset({_L.LOADING, _L.ABSENT, _L.FAILED}),
    _L.UNLOADING: frozenset({_L.ABSENT, _L.READY, _L.FAILED}),
    _L.FAILED: frozenset({_L.DOWNLOADING, _L.LOADING, _L.ABSENT}),
}
"""Moves that the engine makes; `unloading` goes back to `ready` where the model is needed again before."""
CLIENT_MODEL_MOVES = MODEL_MOVES | {
    _L.ABSENT: MODEL_MOVES[_L.ABSENT] | {_L.SUSPENDED},
    _L.READY: MODEL_MOVES[_L.READY] | {_L.ABSENT},
    _L.UNLOADING: MODEL_MOVES[_L.UNLOADING] | {_L.SUSPENDED, _L.LOADING},
}
"""With the moves that only the client sees: an engine ends with its models, or leaves before it has loaded
what the next one is to load; an unload that takes no time is reported as `absent` alone, and one of a model
that is loaded otherwise at once as `unloading` alone."""


def is_move(before: ModelLife, after: ModelLife, table: Mapping[ModelLife, frozenset[ModelLife]]) -> bool:
    """Whether the table has that move, or there is none."""
    return after is before or after in table[before]


class Policy(StrEnum):
    """How a step is shared between those who decode and those who prefill (SPEC Q9).

    `latency` keeps a step within the target while an interactive request decodes, `balanced` within three
    times the target, `throughput` leaves prefill three quarters of the token budget.
    """

    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


class CacheMode(StrEnum):
    """What is kept of finished requests (SPEC C10): nothing, cells, snapshots in memory and on disk, both."""

    OFF = "off"
    LIVE = "live"
    SNAPSHOT = "snapshot"
    BOTH = "live+snapshot"

    @property
    def keeps_cells(self) -> bool:
        """Whether cells are shared and kept for reuse."""
        return self in {CacheMode.LIVE, CacheMode.BOTH}

    @property
    def keeps_snapshots(self) -> bool:
        """Whether states are kept as bytes."""
        return self in {CacheMode.SNAPSHOT, CacheMode.BOTH}


class KVLayout(StrEnum):
    """Where the tokens of sequences lie (SPEC C15).

    In one pool sequences share cells, and a step reads what all of them hold. In streams each has cells of
    its own for as many tokens as a request may use. AUTO: streams on an accelerator whose memory holds them.
    """

    AUTO = "auto"
    POOL = "pool"
    STREAMS = "streams"


class FlashAttention(StrEnum):
    """Whether attention is one operation over the cells (SPEC C21).

    AUTO: wherever the model and the device can. OFF: products of whole matrices, by which a CPU writes the
    tokens of one answer behind a long text two to three times as fast. Values lie by channel then, so a state
    whose cells lie apart takes longer to be copied (docs/adr/0037).
    """

    AUTO = "auto"
    OFF = "off"


class Repeatable(StrEnum):
    """Whether a CPU computes each token as if its request ran alone, which costs time (SPEC E2).

    AUTO: where it was measured to cost less than a twentieth.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Reach(StrEnum):
    """What the name of a model that is not served may lead to."""

    LOCAL = "local"  # what `stoker models` lists, and files below the models folder
    HUB = "hub"  # also repositories of the hub, which are downloaded
    ANY = "any"  # also the fake backend: for programs and tests, never for callers over HTTP


class Speculation(StrEnum):
    """What guesses tokens ahead (SPEC D9): nothing, repeats in the text, a draft model, or both."""

    OFF = "off"
    LOOKUP = "lookup"
    DRAFT = "draft"
    AUTO = "auto"

    @property
    def looks_up(self) -> bool:
        """Whether repeats in the text are continued."""
        return self in {Speculation.LOOKUP, Speculation.AUTO}

    @property
    def uses_model(self) -> bool:
        """Whether a draft model is asked, if there is one."""
        return self in {Speculation.DRAFT, Speculation.AUTO}


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of a model (SPEC K6).

    Attributes:
        name: by which requests ask for it.
        path: the GGUF file.
        scale: its strength where a request does not say.
        size_bytes: of its tensors.
        num_wide: numbers a token of the widest product that it adds to.
    """

    name: str
    path: str
    scale: float = 1.0
    size_bytes: int = 0
    num_wide: int = 0


class ProjectorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder of a model's images and recordings (SPEC V1, V9).

    Attributes:
        path: the GGUF file (mmproj).
        size_bytes: of its tensors.
        compute_bytes: the most that encoding takes beside them.
        has_vision: it takes images.
        hears_hz: samples a second at which it takes recordings; 0: it takes none.
        hearing: kind of the part that listens, such as "voxtral"; empty: it takes none.
    """

    path: str
    size_bytes: int = 0
    compute_bytes: int = 0
    has_vision: bool = True
    hears_hz: int = 0
    hearing: str = ""


class SplitMode(StrEnum):
    """How several devices share a model: they do not, by layers, or by rows of each matrix."""

    NONE = "none"
    LAYER = "layer"
    ROW = "row"


NO_DEVICE = "none"


class PlacementSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights and cells of a model lie.

    Attributes:
        gpu_layers: layers on devices, the output counting as one; "auto": as many as fit.
        device: names of devices or their indexes in text; empty: all there are, "none": the CPU.
        split_mode: None: by layer where `tensor_split` is given or no device holds it alone, else on one.
        tensor_split: a part for each device; empty: by their free memory.
        main_gpu: index among `device` of the one that holds all where nothing is split; None: the freest.
        cpu_moe: layers, from the first, whose experts stay in host memory; None: as many as have to.
        mmap: the file is mapped, else read whole.
        kv_offload: cells lie where their layers do, else in host memory.
        expert_budget: bytes that experts may have in host memory, where the others are read from the mapped
            file as they are needed (docs/memory.md); None: all of them lie there.
    """

    gpu_layers: int | Literal["auto", "all"] = "auto"
    device: tuple[str, ...] = ()
    split_mode: SplitMode | None = None
    tensor_split: tuple[float, ...] = ()
    main_gpu: int | None = None
    cpu_moe: int | None = None
    mmap: bool = True
    kv_offload: bool = True
    expert_budget: int | None = None

    @property
    def streams_experts(self) -> bool:
        """Whether experts are read from the file as they are needed, if there are any."""
        return self.mmap and self.expert_budget is not None

    @property
    def has_devices(self) -> bool:
        """Whether anything may lie on a device."""
        return self.device != (NO_DEVICE,) and self.gpu_layers != 0


ANYWHERE = PlacementSpec()
"""Wherever it fits."""


CALL_TOKENS = 512
STREAM_CALL_TOKENS = 2048
"""The same in streams on a device, where a call takes 10 ms of the host however few tokens it has."""


CLIENT_SIDE = (
    "aliases",
    "best_priority",
    "chat_template",
    "quantisation",
    "sampling_defaults",
    "score_output",
    "thinking",
    "tool_format",
)
"""Fields of a spec and of an info that no engine looks at."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to load and how.

    Attributes:
        id: the name it is served under.
        path: its file or folder; "fake:" selects the deterministic FakeBackend.
        backend: name of the one that serves it; empty: the first that reads the path.
        fallbacks: other ways to serve it, in their order, where this one cannot (docs/adr/0032); they have
            none of their own.
        passed_over: why ways that come before this one are not tried, for people.
        num_slots: sequences that may run at once.
        n_ctx: the most tokens one request may use; 0: the model's own.
        num_cells: KV cells of one pool for all slots; 0: as many as `n_ctx`. Streams take as many for each
            sequence as it may use.
        n_batch: tokens one step may carry; 0: what suits that on which it is computed.
        num_threads: at most; 0: the number of physical cores.
        policy: how steps are shared between decode and prefill (SPEC Q9).
        target_step_ms: of a step while an interactive request decodes (SPEC Q8).
        max_step_ms: of any step (SPEC Q23).
        background_patience_s: the longest that background work goes without a step (SPEC Q7).
        park_bytes: host memory that states of parked requests may take (SPEC Q4).
        cache_mode: what is kept of finished requests (SPEC C10).
        kv_type: element type of the KV cells, such as "q8_0"; empty: the backend's choice.
        repeatable: whether answers may depend on what is computed beside them.
        placement: where its weights and cells lie.
        kv_layout: where the tokens of sequences lie.
        flash_attention: whether attention is one operation.
        keep_alive_s: in memory after its last request (SPEC R8); negative: for good, 0: not at all.
        is_pinned: it is never unloaded to make room (SPEC R3).
        speculation: what guesses its tokens ahead (SPEC D9).
        draft_path: the GGUF file of a smaller model of the same vocabulary that guesses; empty: none.
        adapters: those that requests may ask for (SPEC K6).
        projector: None: it takes no images.
        chat_template: what conversations are laid out with; None: what its file says.
        score_output: which output of a reranker's classifier is the score; None: not known.
        aliases: further names that it is served under.
        best_priority: requests get this class at most, "interactive" or "background".
        sampling_defaults: what requests get that do not say, by the names of `Sampling`.
        thinking: whether it thinks before it answers, or how hard, where a request does not say.
        tool_format: name of the format of tool calls; None: as the template has it.
        quantisation: label such as Q4_K_M.
        content: digest of all that its files hold, by which other machines know its states too; empty: they
            are known by size, time and samples of the files.
    """

    id: str
    path: str
    backend: str = ""
    fallbacks: tuple[ModelSpec, ...] = ()
    passed_over: tuple[str, ...] = ()
    num_slots: int = 8
    n_ctx: int = 16384
    num_cells: int = 0
    n_batch: int = 0
    num_threads: int = 0
    max_queue: int = 512
    policy: Policy = Policy.LATENCY
    target_step_ms: float = 50.0
    max_step_ms: float = 400.0
    background_patience_s: float = 30.0
    park_bytes: int = 2**30
    cache_mode: CacheMode = CacheMode.BOTH
    kv_type: str = ""
    repeatable: Repeatable = Repeatable.ON
    placement: PlacementSpec = ANYWHERE
    kv_layout: KVLayout = KVLayout.AUTO
    flash_attention: FlashAttention = FlashAttention.AUTO
    keep_alive_s: float = 600.0
    is_pinned: bool = False
    speculation: Speculation = Speculation.OFF
    draft_path: str = ""
    adapters: tuple[AdapterSpec, ...] = ()
    projector: ProjectorSpec | None = None
    chat_template: str | None = None
    score_output: int | None = 0
    aliases: tuple[str, ...] = ()
    best_priority: str = "interactive"
    sampling_defaults: dict[str, Any] | None = None
    thinking: bool | str | None = None
    tool_format: str | None = None
    quantisation: str = ""
    content: str = ""

    @property
    def served_by(self) -> str:
        """Backend and path, which tell this way from others."""
        return f"{self.backend} {self.path}".strip()

    @property
    def ways(self) -> tuple[ModelSpec, ...]:
        """This one and its fallbacks, each without any."""
        return (msgspec.structs.replace(self, fallbacks=()), *self.fallbacks)

    def way_of(self, path: str, backend: str) -> ModelSpec:
        """The way that has that path and backend; this one where there is none."""
        return next((way for way in self.ways if (way.path, way.backend) == (path, backend)), self)

    def without(self, way: ModelSpec, why: str) -> ModelSpec | None:
        """The same with one way less, which cannot serve for that reason; None: no other is left."""
        left = [each for each in self.ways if (each.path, each.backend) != (way.path, way.backend)]
        if not left or len(left) == len(self.ways):
            return None
        is_first = (way.path, way.backend) == (self.path, self.backend)
        passed_over = (*self.passed_over, why) if is_first else self.passed_over
        return msgspec.structs.replace(left[0], fallbacks=tuple(left[1:]), passed_over=passed_over)

    def on_all_ways(self, change: Callable[[ModelSpec], ModelSpec]) -> ModelSpec:
        """The same with a change made to each of its ways."""
        first, *others = map(change, self.ways)
        return msgspec.structs.replace(first, fallbacks=tuple(others))

    @property
    def as_loaded(self) -> ModelSpec:
        """Without what changes at once: specs that differ in that alone need no other load."""
        bare = self.with_own(ModelSpec(id=self.id, path=self.path))
        return msgspec.structs.replace(
            bare, passed_over=(), fallbacks=tuple(way.as_loaded for way in self.fallbacks)
        )

    def with_own(self, other: ModelSpec) -> ModelSpec:
        """The same with what changes at once as `other` has it, of each way that both have."""
        fallbacks = tuple(way.with_own(other.way_of(way.path, way.backend)) for way in self.fallbacks)
        same = other.way_of(self.path, self.backend)
        own = {name: getattr(same, name) for name in _AT_ONCE}
        return msgspec.structs.replace(self, fallbacks=fallbacks, **own)

    @property
    def call_tokens(self) -> int:
        """Tokens that one native call computes at once: a step's, where nothing is known to suit better."""
        is_quick = self.kv_layout is KVLayout.STREAMS and self.placement.has_devices
        return self.n_batch or (STREAM_CALL_TOKENS if is_quick else CALL_TOKENS)

    @property
    def pool_cells(self) -> int:
        """KV cells to allocate; 0: the model's own context."""
        return self.num_cells or self.n_ctx

    @property
    def most_tokens(self) -> int:
        """Tokens that one request may have; 0: the model's own context."""
        return min(filter(None, (self.n_ctx, self.num_cells)), default=0)

    def with_cells(self, cells: int) -> ModelSpec:
        """The same with so many cells, and no more context than that."""
        if not self.num_cells:
            return msgspec.structs.replace(self, n_ctx=cells)
        return msgspec.structs.replace(self, num_cells=cells, n_ctx=min(self.n_ctx or cells, cells))


_AT_ONCE = frozenset((*CLIENT_SIDE, "keep_alive_s", "is_pinned"))
"""Fields of a spec that change without another load."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is and the limits that resulted (SPEC K7); before its first load what its header says.

    Attributes:
        path: of its file or folder that serves.
        label: what computes, such as "llama.cpp · CUDA NVIDIA H200"; empty before its first load.
        backend: name of the one that serves it, or is to.
        backend_reason: why it is that one and not one that comes before it; empty: it is the first.
        vocabulary: digest of its tokens where it has several ways to be served (docs/adr/0032).
        num_cells: tokens that all its sequences may hold together; 0: not loaded yet, or it keeps none.
        kv_layout: where the tokens of sequences lie, as in `KVLayout`; "pool" or "streams".
        is_repeatable: its answers are computed as if each ran alone (docs/repeatable.md).
        repeatable_cost: how much longer a step takes for it here, 0.15 being 15 %; None: not measured.
        degraded: what it got less of than was asked for, for want of memory (SPEC R2).
        pairing: with its projector (SPEC V1): "ready", "needs_projector", "broken", "text_only"; or empty.
        pairing_reason: why it sees and hears nothing, where its backend says more than `pairing` does.
        hears_hz: samples a second of the recordings that it takes (SPEC V9); 0: it takes none.
        hearing: kind of the projector's part that listens; empty: there is none.
        gives_states: whether the state that a prompt leaves can be asked for (SPEC D8).
        pooling: how an encoder makes one vector of a text's tokens; empty: it is no encoder.
        n_embd: width of its vectors.
        score_output: as in `ModelSpec`.
        quantisation: label such as Q4_K_M.
        vocabulary_sample: digest of a sample of its tokens, once it was loaded: machines with equal ones go
            on with each other's requests.
        adapters: those that requests may ask for (SPEC K6).
        adapter: the one by whose name it was asked for; empty: by its own.
        aliases, best_priority, sampling_defaults, thinking, tool_format: as in `ModelSpec`.
    """

    id: str
    path: str
    label: str = ""
    backend: str = ""
    backend_reason: str = ""
    vocabulary: str = ""
    model_class: str = ""
    architecture: str = ""
    description: str = ""
    num_params: int = 0
    size_bytes: int = 0
    n_vocab: int = 0
    n_ctx: int
    n_ctx_train: int = 0
    n_batch: int
    num_slots: int
    num_threads: int
    kv_type: str
    num_cells: int = 0
    kv_layout: str = ""
    is_repeatable: bool = False
    repeatable_cost: float | None = None
    flash_attention: str = ""
    memory_bytes: dict[str, int] = {}
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    can_trim: bool = True
    can_fork: bool = True
    has_vision: bool = False
    hears_hz: int = 0
    hearing: str = ""
    pairing: str = ""
    pairing_reason: str = ""
    gives_states: bool = True
    degraded: list[str] = []
    pooling: str = ""
    n_embd: int = 0
    score_output: int | None = 0
    quantisation: str = ""
    vocabulary_sample: str = ""
    adapters: tuple[AdapterSpec, ...] = ()
    adapter: str = ""
    aliases: tuple[str, ...] = ()
    best_priority: str = "interactive"
    sampling_defaults: dict[str, Any] | None = None
    thinking: bool | str | None = None
    tool_format: str | None = None

    def served_as(self, spec: ModelSpec) -> ModelInfo:
        """The same with what the client does for a model that is served so."""
        own = {name: getattr(spec, name) for name in CLIENT_SIDE}
        own["chat_template"] = spec.chat_template or self.chat_template
        return msgspec.structs.replace(self, **own)

    @classmethod
    def bare(cls, spec: ModelSpec) -> ModelInfo:
        """Of a model whose file was not read: what was asked for."""
        return cls(
            id=spec.id,
            path=spec.path,
            backend=spec.backend,
            backend_reason="; ".join(spec.passed_over),
            n_ctx=spec.most_tokens,
            n_batch=spec.call_tokens,
            num_slots=spec.num_slots,
            num_threads=spec.num_threads,
            kv_type=spec.kv_type,
            chat_template=spec.chat_template,
            score_output=spec.score_output,
        ).served_as(spec)

    @property
    def served_by(self) -> str:
        """Backend and path, as in `ModelSpec`."""
        return f"{self.backend} {self.path}".strip()

    @property
    def asked_as(self) -> str:
        """The name it was asked for by: its id, or an adapter's."""
        return self.adapter or self.id

    @property
    def class_text(self) -> str:
        """Its class for messages: "an encoder model (bert)"."""
        article = "an" if self.model_class.startswith("e") else "a"
        return f"{article} {self.model_class} model ({self.architecture})"

    @property
    def takes_conversations(self) -> bool:
        """Whether conversations can be laid out for it."""
        return bool(self.chat_template)
