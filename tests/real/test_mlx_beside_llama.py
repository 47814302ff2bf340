"""SmolLM2 in float32 by MLX and by llama.cpp: the same greedy tokens, and scores within a thousandth.

llama.cpp is asked directly, as its cells have to be float32 too, which Stoker does not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from model_folders import smollm2_file, smollm2_folder
from stoker.backends.protocol.backend import BatchPlan, PlanItem, Rows
from stoker.ipc.model import ModelSpec
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext

NUM_TOKENS = 64
TOPICS = (
    *("the sea", "a small village", "how bread rises", "the history of glass", "why leaves fall"),
    *("a lost key", "the moon", "trains at night", "an old clock", "three brothers", "rain in spring"),
    *("a library", "salt", "the first ship", "a game of chess", "winter birds", "a letter home"),
    *("copper wire", "the number seven", "an empty room"),
)
CHOICES = (" The sea is deep", " A stone", " Blue water and salt")
F32 = 0


class Reference:
    """llama.cpp on a file in float32, one sequence, every row of logits."""

    def __init__(self, path: Path) -> None:
        import llama_cpp  # noqa: PLC0415

        self._model = llama_cpp.Llama(
            model_path=str(path),
            n_ctx=256,
            n_threads=1,
            type_k=F32,
            type_v=F32,
            flash_attn=False,
            logits_all=True,
            verbose=False,
        )

    def rows(self, tokens: list[int]) -> Rows:
        """The logits after each of some tokens."""
        self._model.reset()
        self._model.eval(tokens)
        return np.array(self._model.scores[: len(tokens)])

    def close(self) -> None:
        """Free it."""
        self._model.close()


def write_f32(path: Path) -> Path:
    """The package's file with the same numbers in float32."""
    reader, writer = gguf.GGUFReader(smollm2_file()), gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MLX's."""
    model = pytest.importorskip("stoker.backends.mlx.model", reason="MLX is not installed (the mlx extra)")
    path = smollm2_folder(tmp_path_factory.mktemp("mlx") / "SmolLM2")
    spec = ModelSpec(id="m", path=str(path), num_slots=20, n_ctx=4096, num_threads=1)
    backend = model.load_backend(ModelFolder.open(path), spec, LoadContext(lambda _: None))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """llama.cpp's."""
    found = Reference(write_f32(tmp_path_factory.mktemp("gguf") / "f32.gguf"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def read(backend: Any) -> Callable[[str], list[int]]:
    """The tokens of a question."""

    def tokens_of(topic: str) -> list[int]:
        text = f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n<|im_start|>assistant\n"
        return list(backend.vocabulary.tokenize(text, add_special=True, parse_special=True))

    return tokens_of


def said_together(backend: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What follows each greedily, all of them rows of the same steps."""
    rows = [
        backend.launch(BatchPlan((PlanItem(seq, 0, prompt, 1),))).rows()[0]
        for seq, prompt in enumerate(prompts)
    ]
    said = [[int(row.argmax())] for row in rows]
    for _ in range(num_tokens - 1):
        items = tuple(PlanItem(seq, backend.length(seq), each[-1:], 1) for seq, each in enumerate(said))
        for each, row in zip(said, backend.launch(BatchPlan(items)).rows(), strict=True):
            each.append(int(row.argmax()))
    for seq in range(len(prompts)):
        backend.drop(seq)
    return said


@pytest.mark.long
@pytest.mark.parametrize(
    "topics", [TOPICS[:2], pytest.param(TOPICS[2:], marks=pytest.mark.slow)], ids=["two", "eighteen"]
)
def test_the_first_tokens_are_those_of_llama_cpp(
    backend: Any, reference: Reference, read: Callable[[str], list[int]], topics: tuple[str, ...]
) -> None:
    """SPEC F9: each is llama.cpp's best after the same tokens, which are then the same throughout."""
    prompts = [read(topic) for topic in topics]
    for prompt, said in zip(prompts, said_together(backend, prompts, NUM_TOKENS), strict=True):
        rows = reference.rows([*prompt, *said[:-1]])[len(prompt) - 1 :]
        assert said == [int(row.argmax()) for row in rows]


@pytest.mark.long
def test_scores_are_those_of_llama_cpp(
    backend: Any, reference: Reference, read: Callable[[str], list[int]]
) -> None:
    """SPEC F9, D5: within a thousandth, in whatever slices they come."""
    prompt = read(TOPICS[0])
    texts = [backend.vocabulary.tokenize(text, add_special=False, parse_special=False) for text in CHOICES]
    found = [0.0] * len(texts)
    for namespace in (b"a", b"b"):
        found = [0.0] * len(texts)
        scoring = backend.scoring(prompt, texts, namespace)
        while not scoring.is_done:
            for scored in scoring.advance(64):
                found[scored.text] += sum(map(logprob, scored.rows, scored.tokens))
    for text, total in zip(texts, found, strict=True):
        rows = reference.rows([*prompt, *text])[len(prompt) - 1 : -1]
        assert abs(total - sum(map(logprob, rows, text))) < 1e-3


def logprob(row: Rows, token: int) -> float:
    """Of a token, by its row of logits."""
    values = row.astype(np.float64)
    values -= values.max()
    return float(values[token] - np.log(np.exp(values).sum()))
