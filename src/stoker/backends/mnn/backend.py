"""One of MNN's language models as a backend: one sequence, which can be cut short and go on (SPEC X2)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.backends.mnn.binding import MnnModel, label
from stoker.backends.mnn.estimate import estimate, num_cells
from stoker.backends.mnn.vocabulary import MnnVocabulary
from stoker.backends.protocol.backend import BatchPlan, Capabilities, Computed, Lengths
from stoker.backends.protocol.extensions import NO_EXTENSIONS
from stoker.backends.threads import num_physical_cores
from stoker.errors import ModelLoadError, PoolFullError, StepFailedError, StokerError, UnsupportedError
from stoker.ipc.model import FlashAttention, ModelClass

if TYPE_CHECKING:
    from stoker.backends.mnn.folder import MnnFolder
    from stoker.ipc.model import ModelSpec

log = logging.getLogger(__name__)

FIRST_TOKENS = (1, 0, 1)
"""What is computed first: it tells how many logits there are, and whether they are numbers."""


class MnnBackend:
    """A loaded model.

    Args:
        model: native, with an empty sequence.
        folder: what it was loaded from.
        spec: how it is to be used.

    Raises:
        ModelLoadError: it computes nothing that can be used.
    """

    def __init__(self, model: MnnModel, folder: MnnFolder, spec: ModelSpec) -> None:
        self._model = model
        n_vocab = _first_step(model, folder)
        lines = estimate(folder, spec).lines
        self._memory = {name: lines[name] for name in ("weights", "kv", "compute")}
        self.vocabulary = MnnVocabulary(model.native, folder, n_vocab)
        self.extensions = NO_EXTENSIONS
        cells = num_cells(folder, spec)
        self.capabilities = Capabilities(
            model_class=ModelClass.DECODER,
            architecture=folder.architecture,
            description=folder.path.name,
            label=label(),
            n_vocab=n_vocab,
            n_ctx=cells,
            n_ctx_train=folder.context_length,
            num_cells=cells,
            n_batch=spec.call_tokens,
            num_sequences=1,
            num_params=0,
            size_bytes=folder.size_bytes,
            kv_type="f32",
            flash_attention="off",
            can_trim=True,
            can_fork=False,
            computes_on_cpu=True,
            fingerprint=folder.fingerprint,
            pairing=str(folder.pairing),
            pairing_reason=folder.pairing_reason,
        )
        self._lengths = Lengths(1, n_vocab, spec.call_tokens)

    def __repr__(self) -> str:
        return f"<MnnBackend {self.capabilities.description} {self._lengths}>"

    def launch(self, plan: BatchPlan) -> Computed:
        """Compute it here."""
        self._lengths.check(plan)
        (item,) = plan.items
        if min(item.tokens) < 0:
            raise StepFailedError("a model of MNN's takes no images", seq=item.seq)
        if item.start + len(item.tokens) > self.capabilities.num_cells:
            raise PoolFullError(
                f"{item.start} cells of {self.capabilities.num_cells} are used", num_tokens=len(item.tokens)
            )
        rows = self._model.step(item.tokens, item.num_logits)
        self._lengths.advance(plan)
        return Computed(rows)

    def fork(self, src: int, dst: int, length: int) -> None:
        """There is one sequence."""
        raise UnsupportedError(f"MNN has 1 sequence: {length} tokens of {src} cannot be shared with {dst}")

    def trim(self, seq: int, length: int) -> None:
        """Keep the first tokens."""
        self._lengths[seq] = min(self._lengths[seq], length)
        self._model.cut(length)

    def drop(self, seq: int) -> None:
        """Keep nothing."""
        self.trim(seq, 0)

    def length(self, seq: int) -> int:
        """Tokens held."""
        return self._lengths[seq]

    def memory(self) -> dict[str, int]:
        """By the sizes of its files: MNN does not say what it has taken."""
        return dict(self._memory)

    def close(self) -> None:
        """Free the model; idempotent."""
        self.vocabulary.close()
        self._model.close()


def load(folder: MnnFolder, spec: ModelSpec) -> MnnBackend:
    """Load a folder that was tried; see `stoker.backends.mnn.trial`.

    Raises:
        UnsupportedError: it is asked for what MNN's binding does not do, or MNN is not installed.
        ModelLoadError: MNN refuses it, or computes nonsense.
    """
    refuse_unsupported(spec)
    if spec.num_slots > 1:
        log.warning("%s: MNN computes 1 sequence at a time: 1 slot, not %d", spec.id, spec.num_slots)
    model = MnnModel(folder, spec.num_threads or num_physical_cores())
    try:
        return MnnBackend(model, folder, spec)
    except BaseException:
        model.close()
        raise


def refuse_unsupported(spec: ModelSpec) -> None:
    """Raises UnsupportedError that names what is asked for and MNN's binding does not do."""
    asked = {
        "lora": (bool(spec.adapters), "LoRA adapters"),
        "mmproj": (spec.projector is not None, "a projector: MNN's binding gives no way to hand it images"),
        "kv_type": (spec.kv_type not in {"", "f32"}, f"cells of {spec.kv_type}: its own are f32"),
        "draft_model": (bool(spec.draft_path), "a draft model"),
        "flash_attention": (spec.flash_attention is FlashAttention.OFF, "flash_attention off"),
    }
    for param, (is_asked, what) in asked.items():
        if is_asked:
            raise UnsupportedError(f"{spec.id}: MNN's models are not served with {what}", param=param)


def _first_step(model: MnnModel, folder: MnnFolder) -> int:
    """Logits a row, once some were computed."""
    try:
        rows = model.step(FIRST_TOKENS, 1)
    except StokerError as error:
        raise ModelLoadError(f"{folder.path}: {error.message}", path=str(folder.path)) from error
    finally:
        model.cut(0)
    n_vocab = rows.shape[1]
    needed = max(folder.head.n_vocab, *(token + 1 for token in (1, *folder.head.specials, *folder.head.ends)))
    if n_vocab < needed:
        text = f"{folder.path}: it computes {n_vocab} logits for a vocabulary of {needed} tokens"
        raise ModelLoadError(text, path=str(folder.path))
    if folder.embeddings is not None and 0 < folder.n_vocab < n_vocab:
        text = f"{folder.path}: it computes {n_vocab} logits and has embeddings for {folder.n_vocab} tokens"
        raise ModelLoadError(text, path=str(folder.path))
    if not (abs(rows) < float("inf")).all():
        raise ModelLoadError(f"{folder.path}: it computes logits that are not finite", path=str(folder.path))
    return int(n_vocab)
