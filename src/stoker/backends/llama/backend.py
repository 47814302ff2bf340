"""A model of llama.cpp behind the backend protocol: puts model, context and states together."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self

import llama_cpp  # noqa: F401 - before numpy: see `stoker.engine.process.load_native`
import msgspec
import numpy as np

from stoker.backends.expert_pages import ExpertPages
from stoker.backends.llama.adapters import Adapters
from stoker.backends.llama.binding import label, sum_by_device
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.draft import DraftModel, open_draft
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.oneshot.scoring import ChoiceScoring, Scorer
from stoker.backends.llama.smoke.first_decode import first_decode
from stoker.backends.llama.smoke.key_cost import MOST_COST
from stoker.backends.llama.smoke.smoke import (
    note_working,
    tried_options,
    try_in_child,
    untried_options,
)
from stoker.backends.llama.state import HiddenStates, RecurrentStates, SequenceStates
from stoker.backends.llama.vision.vision import BLIND, CallLimits, VisionContext, open_vision
from stoker.backends.protocol.backend import PLAIN, BatchPlan, Capabilities, Computed, Conditioning, PlanItem
from stoker.backends.protocol.extensions import Extensions
from stoker.backends.protocol.scoring import ScoringLane
from stoker.backends.threads import num_physical_cores
from stoker.errors import ModelLoadError, UnsupportedError
from stoker.ipc.model import STEPPED, FlashAttention, KVLayout, Repeatable
from stoker.models.fingerprint import fingerprint
from stoker.models.gguf.header import read_header
from stoker.models.gguf.tensor_types import ROW_BY_ROW
from stoker.models.memory_estimate.estimate import num_sequences, stream_cells
from stoker.models.placement import check_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.llama.text.vocabulary import LlamaVocabulary
    from stoker.backends.llama.vision.vision import LlamaVision
    from stoker.backends.protocol.backend import Buffer, InFlight, Rows
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.usage import Tensor
    from stoker.models.gguf.header import GgufHeader

DEVICE_BATCH = 2048
"""Tokens of a step on a device where nothing was asked for: 41 ms of a 1.5B on an H100, where 512 take 10 and
each step waits for the host once. They are computed by `ModelSpec.call_tokens`, so buffers stay as small."""
STREAMS_BATCH = 8192
"""The same in streams: a crowd of short prompts goes in one step, brought to equal lengths. How many of these
a step should carry is found out by the time that they take."""
log = logging.getLogger(__name__)

THREADS_BESIDE_DEVICES = 2
"""More wait for each other by spinning, on the cores that launch the kernels of the next step."""


class LlamaBackend:
    """One loaded model with its one context, both its own from here on; made by `load`.

    Raises:
        ModelFileError: the file is gone.
        ModelLoadError: a recurrent model's state has a layout that is not known here.
    """

    def __init__(  # noqa: PLR0913 - the parts of one model, and what names its states
        self,
        model: LlamaModel,
        context: LlamaContext,
        header: GgufHeader,
        vision_context: VisionContext = BLIND,
        *,
        n_ctx: int = 0,
        content: str = "",
    ) -> None:
        self._model = model
        self._context = context
        self._vision = vision_context.vision
        self._states = SequenceStates(model, context, content or fingerprint(header.path))
        self._recurrent = RecurrentStates(model, context) if model.is_recurrent else None
        self._hidden = HiddenStates(model, context)
        self._capabilities = dataclasses.replace(
            _capabilities(header, model, context, n_ctx),
            has_vision=self._vision is not None and self._vision.sees,
            hears_hz=self._vision.hears_hz if self._vision else 0,
            pairing=vision_context.pairing,
            fingerprint=self._states.fingerprint,
            state_layout=self._recurrent.layout if self._recurrent else (),
        )
        self._scorers = {lane: Scorer(model, context.n_ubatch) for lane in ScoringLane}
        self._asked: dict[int, Conditioning] = {}  # of sequences of whose prompt every row is asked
        self._drafter: DraftModel | None = None
        self._pages = ExpertPages.of(header, model.placement)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LlamaBackend {self._context!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, resolved after load."""
        return self._capabilities

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """Its tokenizer, valid until `close`."""
        return self._model.vocabulary

    @property
    def uses_extra_bufts(self) -> bool:
        """Whether the CPU may repack weights for its special instructions."""
        return self._model.uses_extra_bufts

    @property
    def num_threads(self) -> int:
        """CPU threads a step uses."""
        return self._context.num_threads

    @property
    def drafter(self) -> DraftModel | None:
        """The model that guesses for it; None: it has none."""
        return self._drafter

    @property
    def extensions(self) -> Extensions:
        """All there are, as far as model, projector and draft model have them."""
        return Extensions(
            conditioner=self,
            states=self,
            copy_times=self._context if self._context.is_off_host else None,
            recurrent=self if self._recurrent else None,
            hidden=self,
            scorer=self,
            vision=self._vision,
            drafter=self._drafter,
            threads=self,
            aborts=self._context.abort_flag,
            compaction=self._context,
            tiles=self._context.tiles,
            scratch=self,
            draws=self._context.draws,
            devices=self if self._model.devices else None,
            pages=self._pages,
        )

    def add_drafter(self, drafter: DraftModel) -> None:
        """Have it guessed for; the draft model is its own from here on."""
        self._drafter = drafter

    @property
    def vision(self) -> LlamaVision | None:
        """Its projector; None: it takes no images."""
        return self._vision

    def launch(self, plan: BatchPlan) -> InFlight:
        """Begin one forward pass; see `Backend.launch`. A call that raises changed nothing."""
        with self._pages.step() if self._pages else nullcontext():
            return self._launch(plan)

    def _launch(self, plan: BatchPlan) -> InFlight:
        if not self._asked:
            return self._context.launch(plan)
        counts = [self._num_scored(item) for item in plan.items]
        return self._step_and_score(plan, counts) if any(counts) else self._context.launch(plan)

    def _step_and_score(self, plan: BatchPlan, counts: list[int]) -> Computed:
        """A step of which the scorer gives the rows of whole prompts, `counts` of each item."""
        scores = [
            self._scored(item) if count else None for item, count in zip(plan.items, counts, strict=True)
        ]
        served = tuple(
            msgspec.structs.replace(item, num_logits=item.num_logits - count)
            for item, count in zip(plan.items, counts, strict=True)
        )
        in_flight = self._context.launch(BatchPlan(served))
        found, rows, at = in_flight.rows(), [], 0
        for item, score in zip(served, scores, strict=True):
            if item.takes_candidates:
                continue
            rows += [] if score is None else [score]
            rows.append(found[at : at + item.num_logits])
            at += item.num_logits
        return Computed(np.concatenate(rows), in_flight.candidates())

    def _num_scored(self, item: PlanItem) -> int:
        """Of how many of its first tokens the scorer gives the rows.

        It begins from the model's own state and has its own weights, so it cannot for every sequence.
        """
        asked = self._asked.get(item.seq, PLAIN).asked[item.start : item.start + len(item.tokens)]
        if item.num_logits < len(item.tokens) or tuple(item.tokens[: len(asked)]) != asked:
            return 0
        is_plain = item.seq not in self._context.with_initial_state and not self._context.is_adapted(item.seq)
        is_other = self._capabilities.computes_on_cpu or self._context.key_type is not KeyType.F16
        return len(asked) if is_plain and is_other else 0

    def _scored(self, item: PlanItem) -> Rows:
        asked = self._asked[item.seq]
        until = min(item.start + len(item.tokens), len(asked.asked))
        scorer = self._scorers[asked.lane]
        return scorer.score(asked.asked, item.start, until, self.num_threads, asked.namespace)

    def scoring(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        namespace: bytes = b"",
        lane: ScoringLane = ScoringLane.CHOICES,
    ) -> ChoiceScoring:
        """How likely texts are after a prompt, by llama.cpp's defaults; see `oneshot.scoring`."""
        return ChoiceScoring(self._scorers[lane], prompt, texts, namespace, lambda: self.num_threads)

    def condition(self, seq: int, conditioning: Conditioning) -> None:
        """Compute the sequence's next tokens with this; UnsupportedError for what the model cannot do."""
        if conditioning.source or (conditioning.pictures and self._vision is None):
            raise UnsupportedError(f"{self._capabilities.description} takes tokens and nothing beside them")
        self._context.see(seq, conditioning.pictures)
        self._context.adapt(seq, conditioning.adapters)
        if conditioning.asked:
            self._asked[seq] = conditioning
        else:
            self._asked.pop(seq, None)

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`."""
        self._context.fork(src, dst, length)

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens. Raises UnsupportedError where the model cannot go back."""
        self._context.trim(seq, length)

    def drop(self, seq: int) -> None:
        """Forget the sequence and free its cells."""
        self._context.drop(seq)

    def length(self, seq: int) -> int:
        """Tokens the sequence holds."""
        return self._context.lengths[seq]

    def export_state(self, seq: int) -> Buffer:
        """The sequence's state, bit-exact."""
        return self._states.export(seq)

    def import_state(self, seq: int, data: Buffer) -> None:
        """Put exported state into the empty sequence `seq`; InvalidRequestError, PoolFullError."""
        self._states.restore(seq, data)

    def read_state(self, seq: int) -> list[Tensor]:
        """A recurrent model's state after the sequence's tokens; UnsupportedError."""
        return self._recurrent_states().read(seq)

    def write_state(self, seq: int, tensors: Sequence[Tensor]) -> None:
        """Let the empty sequence `seq` begin from a state; UnsupportedError, PoolFullError."""
        self._recurrent_states().write(seq, tensors)

    def last_hidden(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """What the model made of the last of the sequence's tokens; see `LastHidden`."""
        return self._hidden.last(seq, tokens)

    def _recurrent_states(self) -> RecurrentStates:
        if self._recurrent is None:
            found = self._capabilities
            raise UnsupportedError(
                f"{found.description} is a {found.model_class} model ({found.architecture}):"
                " it has no recurrent state to begin from or to save",
                param="state",
            )
        return self._recurrent

    def memory(self) -> dict[str, int]:
        """Bytes by line: weights, kv, compute."""
        lines = {"weights": self._capabilities.size_bytes, **self._context.memory()}
        if self._pages:
            lines["weights"] -= self._pages.size_bytes
            lines["experts"] = self._pages.budget_bytes
        if self._context.adapters:
            lines["adapters"] = self._context.adapters.size_bytes
        lines |= self._vision.memory() if self._vision else {}
        lines |= {"draft": self._drafter.memory()} if self._drafter else {}
        lines["compute"] += sum(scorer.memory() for scorer in self._scorers.values())
        return lines

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What of that lies on accelerators, by id; see `OnDevices`."""
        adapters, drafter, vision = self._context.adapters, self._drafter, self._vision
        return sum_by_device(
            self._model.memory_by_device(),
            self._context.memory_by_device(),
            adapters.on_devices if adapters else {},
            vision.memory_by_device() if vision else {},
            drafter.memory_by_device() if drafter else {},
            *(scorer.memory_by_device() for scorer in self._scorers.values()),
        )

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next step on."""
        self._context.set_threads(num_threads)
        if self._vision:
            self._vision.set_threads(num_threads)
        if self._drafter:
            self._drafter.set_threads(num_threads)

    def give_back(self) -> None:
        """Free the contexts of scores; who is in the middle of some computes their beginning again."""
        self._close_scorers()

    def _close_scorers(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()

    def close(self) -> None:
        """Free cells, then weights; idempotent."""
        self._is_closed = True
        if self._drafter:
            self._drafter.close()
        if self._vision:
            self._vision.close()
        self._close_scorers()
        self._context.close()
        self._model.close()


def load(
    spec: ModelSpec,
    on_progress: Callable[[float], None] | None = None,
    cache_dir: Path | None = None,
    header: GgufHeader | None = None,
) -> LlamaBackend:
    """Load a model file that was tried: by a child, or on an accelerator by its first decode (SPEC R9, K1).

    Args:
        spec: the file and the limits asked for.
        on_progress: told the fraction of the weights loaded; what it raises cancels the load.
        cache_dir: where smoke verdicts are remembered; None: this user's cache folder.
        header: of the file, where it was read already.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt or foreign.
        UnsupportedError: a sound model of a class that does not generate.
        ModelLoadError: llama.cpp refused it or crashes on it.
    """
    header = header or read_header(spec.path)
    if header.model_class not in STEPPED:
        raise UnsupportedError(
            f"{header.path.name} is an {header.model_class} ({header.architecture}): "
            f"this build generates with decoder, recurrent and hybrid models only",
            model_class=str(header.model_class),
        )
    untried = untried_options(spec, header, on_progress, cache_dir)
    options = untried or tried_options(spec, header, on_progress, cache_dir)
    backend, nonsense = _decoded_first(spec, header, options, is_tried=untried is None)
    if nonsense:
        log.warning("%s: %s; a child process finds what works", header.path.name, nonsense)
        try_in_child(spec, header, on_progress, cache_dir)
        options = tried_options(spec, header, on_progress, cache_dir)
        backend, nonsense = _decoded_first(spec, header, options, is_tried=False)
    if nonsense:
        raise ModelLoadError(f"{header.path.name} cannot be run here: {nonsense}", path=str(header.path))
    if untried is not None and options is untried:
        note_working(spec, header, backend.capabilities.label, cache_dir)
    return backend


def _decoded_first(
    spec: ModelSpec, header: GgufHeader, options: ModelOptions, *, is_tried: bool
) -> tuple[LlamaBackend, str]:
    """The model, and what is wrong with its first logits, which close it; empty where nothing is.

    A CPU that was tried decodes nothing: it has no kernels to warm.
    """
    backend = _put_together(spec, header, options)
    if is_tried and backend.capabilities.computes_on_cpu:
        return backend, ""
    try:
        nonsense = first_decode(backend)
    except BaseException:
        backend.close()
        raise
    if nonsense:
        backend.close()
    return backend, nonsense


def _put_together(spec: ModelSpec, header: GgufHeader, options: ModelOptions) -> LlamaBackend:
    """Model, context, projector and draft model; where one fails, those before it are freed."""
    options = dataclasses.replace(options, header=header)
    with ExitStack() as made:
        model = LlamaModel(options)
        made.callback(model.close)
        adapters = Adapters(model, header, spec.adapters) if spec.adapters else None
        context = _open_context(spec, model, adapters)
        made.callback(context.close)
        vision_context = open_vision(spec, model, header, CallLimits(context.num_threads, context.n_ubatch))
        if vision_context.vision:
            made.callback(vision_context.vision.close)
        backend = LlamaBackend(
            model,
            context,
            header,
            vision_context,
            n_ctx=spec.n_ctx if spec.num_cells or context.has_streams else 0,
            content=spec.content,
        )
        made.pop_all()
    found = backend.capabilities
    if spec.repeatable is Repeatable.ON and found.computes_on_cpu and not found.is_repeatable:
        kinds = found.kv_type, found.model_class, ", ".join(sorted(header.tensor_types))
        log.warning(
            "%s: its texts are not repeatable, with %s cells of a %s and weights in %s",
            header.path.name,
            *kinds,
        )
    if spec.draft_path and spec.speculation.uses_model:
        _add_drafter(backend, spec, model)
    return backend


def _add_drafter(backend: LlamaBackend, spec: ModelSpec, model: LlamaModel) -> None:
    try:
        n_ctx = backend.capabilities.n_ctx
        backend.add_drafter(open_draft(spec.draft_path, model, n_ctx, backend.num_threads))
    except BaseException:
        backend.close()
        raise


def _open_context(spec: ModelSpec, model: LlamaModel, adapters: Adapters | None) -> LlamaContext:
    """In the layout of cells that is asked for, "auto" being a pool; streams only of models that can."""
    is_asked = spec.kv_layout is KVLayout.STREAMS and _has_one_position_a_cell(spec, model)
    layout = KVLayout.STREAMS if is_asked else KVLayout.POOL
    context = LlamaContext(model, _context_options(spec, model, layout), adapters)
    if context.has_streams and not context.has_plain_states:
        context.close()
        context = LlamaContext(model, _context_options(spec, model, KVLayout.POOL), adapters)
    return context


def _context_options(spec: ModelSpec, model: LlamaModel, layout: KVLayout) -> ContextOptions:
    """Limits for the slots asked for, with sequences to spare for prefixes that no slot runs."""
    spec = msgspec.structs.replace(spec, kv_layout=layout)
    if model.is_recurrent:  # it has no attention
        spec = msgspec.structs.replace(spec, flash_attention=FlashAttention.AUTO)
    key_type, has_streams = _key_type(spec, model), layout is KVLayout.STREAMS
    check_attention(spec)
    if not model.devices:
        _require_no_repeatability(spec)
    is_repeatable = key_type is not KeyType.F16 and spec.repeatable is not Repeatable.OFF
    is_fused = spec.flash_attention is not FlashAttention.OFF
    keeps_order = is_repeatable and is_fused and not model.devices and _has_one_position_a_cell(spec, model)
    n_ctx_train, on_device = model.n_ctx_train, STREAMS_BATCH if has_streams else DEVICE_BATCH
    return ContextOptions(
        num_cells=stream_cells(spec, n_ctx_train) if has_streams else spec.pool_cells or n_ctx_train,
        n_batch=(spec.n_batch or on_device) if model.devices else spec.call_tokens,
        n_ubatch=spec.call_tokens,
        num_sequences=num_sequences(spec.num_slots, layout),
        num_threads=_num_threads(spec, model),
        key_type=key_type,
        flash_attention=spec.flash_attention,
        keeps_order=keeps_order and not has_streams,
        has_streams=has_streams,
        pads_prompts=_has_one_position_a_cell(spec, model),
        offloads_cells=spec.placement.kv_offload,
        draws=bool(model.devices) and spec.placement.gpu_layers != 0,  # where the output matrix lies
        is_off_host=bool(model.devices) and spec.placement.kv_offload and model.keeps_every_cell,
        is_marked=_is_in_one_graph(spec, model),
    )


def _has_one_position_a_cell(spec: ModelSpec, model: LlamaModel) -> bool:
    """Whether cells can be told apart by their positions: those of a picture in a grid have one together."""
    return model.keeps_every_cell and not (spec.projector and model.has_grids)


def _num_threads(spec: ModelSpec, model: LlamaModel) -> int:
    """Every core where layers are computed on them; beside devices that compute all, a few for embeddings."""
    is_on_devices = _is_whole_on_devices(spec, model)
    return spec.num_threads or (THREADS_BESIDE_DEVICES if is_on_devices else num_physical_cores())


def _is_whole_on_devices(spec: ModelSpec, model: LlamaModel) -> bool:
    """Whether devices compute every layer."""
    place = spec.placement
    is_parted = isinstance(place.gpu_layers, int) and place.gpu_layers <= model.num_layers
    return bool(model.devices) and place.kv_offload and not is_parted and not place.cpu_moe


def _is_in_one_graph(spec: ModelSpec, model: LlamaModel) -> bool:
    """Whether all that is computed of it on devices is in the graphs of one context, on one device."""
    has_others = bool(spec.projector or spec.draft_path)
    return _is_whole_on_devices(spec, model) and len(model.devices) == 1 and not has_others


def _key_type(spec: ModelSpec, model: LlamaModel) -> KeyType:
    """What was asked for; else of those that take two bytes what is quickest, or makes texts repeatable."""
    if not spec.kv_type:
        return KeyType.BF16 if not model.devices and _is_asked_alike(spec, model) else KeyType.F16
    try:
        return KeyType(spec.kv_type)
    except ValueError:
        known = ", ".join(KeyType)
        raise UnsupportedError(f"cells of type {spec.kv_type!r} are not known; {known} are") from None


def _require_no_repeatability(spec: ModelSpec) -> None:
    """Raises UnsupportedError where a CPU is to compute without flash attention what is to be repeatable."""
    if spec.repeatable is Repeatable.ON and spec.flash_attention is FlashAttention.OFF:
        needs = "flash_attention is off, and repeatable answers need it"
        raise UnsupportedError(
            f"{spec.id}: {needs}: set it to auto, or repeatable to auto or off", param="flash_attention"
        )


def _is_repeatable(header: GgufHeader, model: LlamaModel, context: LlamaContext) -> bool:
    """Whether rows have the same bits in steps of any shape, floats in the weights aside."""
    is_alike = context.is_in_order and context.key_type is not KeyType.F16 and not model.devices
    return is_alike and context.flash_attention != "off" and header.tensor_types <= ROW_BY_ROW


def _is_asked_alike(spec: ModelSpec, model: LlamaModel) -> bool:
    """Whether rows are to be computed alike in steps of any shape: asked for, or cheap."""
    if spec.repeatable is not Repeatable.AUTO:
        return spec.repeatable is Repeatable.ON
    return model.repeatable_cost is not None and model.repeatable_cost < MOST_COST


def _capabilities(header: GgufHeader, model: LlamaModel, context: LlamaContext, n_ctx: int) -> Capabilities:
    return Capabilities(
        model_class=header.model_class,
        architecture=header.architecture,
        description=header.summary,
        label=label(model.devices),
        n_vocab=model.vocabulary.n_vocab,
        n_ctx=min(filter(None, (context.capacity, model.n_ctx_train, n_ctx))),
        n_ctx_train=model.n_ctx_train,
        num_cells=context.num_cells,
        n_batch=context.n_batch,
        num_sequences=context.num_sequences,
        num_params=model.num_params,
        size_bytes=model.size_bytes,
        kv_type=_kv_type_name(context.key_type),
        flash_attention=context.flash_attention,
        kv_layout=KVLayout.STREAMS if context.has_streams else KVLayout.POOL,
        is_repeatable=_is_repeatable(header, model, context),
        repeatable_cost=model.repeatable_cost,
        can_trim=model.keeps_every_cell,
        can_fork=model.keeps_every_cell,
        shares_cells=model.keeps_every_cell and not context.has_streams,
        computes_on_cpu=not model.devices,
        is_async=bool(model.devices),
        trial_token_s=model.token_s,
        adapters=tuple(context.adapters.fingerprints.items()) if context.adapters else (),
    )


def _kv_type_name(key_type: KeyType) -> str:
    """For people: the type of keys and values, both where they differ."""
    is_same = key_type is key_type.value_type
    return str(key_type) if is_same else f"{key_type}/{key_type.value_type}"
