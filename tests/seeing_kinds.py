"""Tiny vision models of each kind: how their pictures are cut, where they lie, and what their tokens see.

`KINDS` names the writers of model and projector. `helped` is llama.cpp's own reading of a prompt with
pictures, the one its server uses, on a context of the test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import gguf
import numpy as np

from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.binding import llama, vision_library
from stoker.ipc.request import Medium, Sound
from tiny_models import WIDTH, write_gemma3, write_qwen2vl, write_qwen3vl, write_smolvlm

EDGE, PATCH, HIDDEN, WIDE, HEADS, NUM_BLOCKS, MERGE = 32, 4, 32, 64, 4, 2, 2
_MERGED = HIDDEN * MERGE**2
_QWEN2, _QWEN3, _GEMMA, _SMOL = "qwen2vl_merger", "qwen3vl_merger", "gemma3", "idefics3"
_SMOL_EDGE = 2 * EDGE

Shapes = dict[str, tuple[int, ...]]


def write_pair(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model of `KINDS` and its projector."""
    write_model, projector = KINDS[kind]
    model = write_model(folder / f"{kind}.gguf")
    return model, _write_projector(folder / f"{kind}-mmproj.gguf", projector)


KINDS: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2vl": (write_qwen2vl, _QWEN2),
    "qwen3vl": (write_qwen3vl, _QWEN3),
    "gemma3": (partial(write_gemma3, is_tied=False), _GEMMA),
    "smolvlm": (write_smolvlm, _SMOL),
}


def _write_projector(path: Path, kind: str, seed: int = 7) -> Path:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny {kind} {seed}")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": EDGE,
        "patch_size": PATCH,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "block_count": NUM_BLOCKS,
        "projection_dim": WIDTH,
        "attention.head_count": HEADS,
        "projector.scale_factor": MERGE,
        "spatial_merge_size": MERGE,
    }
    if kind == _SMOL:
        numbers["preproc_image_size"] = _SMOL_EDGE
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.25] * 3)
    random = np.random.default_rng(seed)
    for name, shape in _shapes(kind).items():
        values = random.normal(size=shape).astype(np.float32)
        values = 1 + values / 8 if "ln" in name or "norm" in name else values / 4
        writer.add_tensor(name, values.astype(np.float16) if "patch_embd.weight" in name else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(kind: str) -> Shapes:
    """All tensors of a projector; `mm.` and deepstack ones make embeddings as wide as the model's."""
    shapes: Shapes = {"v.patch_embd.weight": (HIDDEN, 3, PATCH, PATCH)}
    shapes |= _linear("v.post_ln", (HIDDEN,))
    for index in range(NUM_BLOCKS):
        shapes |= _block(f"v.blk.{index}", is_joined=kind == _QWEN3)
    if kind in {_QWEN2, _QWEN3}:
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]
        shapes |= _linear("mm.0", (_MERGED, _MERGED)) | _linear("mm.2", (WIDTH, _MERGED))
    if kind != _QWEN2:
        shapes |= {"v.patch_embd.bias": (HIDDEN,), "v.position_embd.weight": ((EDGE // PATCH) ** 2, HIDDEN)}
    if kind == _QWEN3:
        shapes |= _linear("v.deepstack.0.norm", (_MERGED,))
        shapes |= _linear("v.deepstack.0.fc1", (_MERGED, _MERGED))
        shapes |= _linear("v.deepstack.0.fc2", (WIDTH, _MERGED))
    if kind == _GEMMA:
        shapes |= {"mm.input_projection.weight": (HIDDEN, WIDTH), "mm.soft_emb_norm.weight": (HIDDEN,)}
    if kind == _SMOL:
        shapes["mm.model.fc.weight"] = (WIDTH, _MERGED)
    return shapes


def _block(name: str, *, is_joined: bool) -> Shapes:
    shapes = _linear(f"{name}.attn_qkv", (3 * HIDDEN, HIDDEN)) if is_joined else {}
    if not is_joined:
        for part in ("attn_q", "attn_k", "attn_v"):
            shapes |= _linear(f"{name}.{part}", (HIDDEN, HIDDEN))
    shapes |= _linear(f"{name}.attn_out", (HIDDEN, HIDDEN))
    shapes |= _linear(f"{name}.ffn_up", (WIDE, HIDDEN)) | _linear(f"{name}.ffn_down", (HIDDEN, WIDE))
    return shapes | _linear(f"{name}.ln1", (HIDDEN,)) | _linear(f"{name}.ln2", (HIDDEN,))


def _linear(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def helped(backend: LlamaBackend, prompt: str, pictures: Sequence[Medium], count: int) -> list[int]:
    """The greedy tokens after a prompt as llama.cpp's own helper reads it, on the backend's last sequence."""
    assert backend.vision is not None
    library, context, seq = vision_library(), backend._context.handle, backend._context.num_sequences - 1
    text = prompt.encode()
    bitmaps = [_bitmap_of(each) for each in pictures]
    chunks = library.mtmd_input_chunks_init()
    told = library.mtmd_input_text(text, len(text), True, True)
    handles = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
    handle, position = backend.vision._handle, llama.llama_pos(0)
    assert library.mtmd_tokenize(handle, chunks, ctypes.byref(told), handles, len(bitmaps)) == 0
    num_batch = backend._context.n_ubatch
    code = library.mtmd_helper_eval_chunks(
        handle, context, chunks, 0, seq, num_batch, True, ctypes.byref(position)
    )
    assert code == 0, f"the helper returned {code}"
    answer = [_likeliest(backend)]
    while len(answer) < count:
        batch = llama.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, answer[-1], position.value + len(answer) - 1
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, seq, 1
        assert llama.llama_decode(context, batch) == 0
        answer.append(_likeliest(backend))
        llama.llama_batch_free(batch)
    library.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        library.mtmd_bitmap_free(bitmap)
    llama.llama_memory_seq_rm(llama.llama_get_memory(context), seq, 0, -1)
    return answer


def _bitmap_of(medium: Medium) -> int:
    library = vision_library()
    if isinstance(medium, Sound):
        samples = [sample / 2**15 for sample in memoryview(medium.pcm).cast("h")]
        return library.mtmd_bitmap_init_from_audio(len(samples), (ctypes.c_float * len(samples))(*samples))
    pixels = (ctypes.c_uint8 * len(medium.rgb))(*medium.rgb)
    return library.mtmd_bitmap_init(medium.width, medium.height, pixels)


def _likeliest(backend: LlamaBackend) -> int:
    row = llama.llama_get_logits_ith(backend._context.handle, -1)
    return int(np.ctypeslib.as_array(row, (backend.capabilities.n_vocab,)).argmax())
