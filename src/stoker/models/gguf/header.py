"""The header of a GGUF file, read with bounds and checked before any native code sees the file (SPEC R1, R7).

Owns the layout (counts, keys, tensor table, data section), what a header tells about the model, and which
architectures are language models of which class (SPEC K1): anything else is refused before a native load.
`checks` and `vocabulary_checks` say whether its values make sense, `stoker.models.shards` knows shards.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass, Pooling
from stoker.models import shards
from stoker.models.gguf import checks as gguf_checks
from stoker.models.gguf import vocabulary_checks
from stoker.models.gguf.bounded_file import ARRAY_TYPE, MAX_KEY_BYTES, BoundedFile, GgufArray, Scalar
from stoker.models.gguf.tensor_types import FILE_TYPES, TENSOR_TYPES
from stoker.wording import params_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DECODERS = frozenset(
    """
    llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo plamo3 codeshell orion internlm2
    minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 starcoder2 xverse command-r cohere2 cohere2moe dbrx
    olmo olmo2 olmoe openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 chatglm glm4 glm4moe glm-dsa
    bitnet jais jais2 nemotron exaone exaone4 exaone-moe granite granitemoe graniteswitch granite_swa
    chameleon plm bailingmoe bailingmoe2 dots1 dots3note arcee afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe
    hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss smallthinker seed_oss grovemoe apertus minimax-m2
    minimax-m3 cogvlm pangu-embedded mistral3 mistral4 paddleocr mimo2 step35 maincoder mellum nanbeige
    spark2_5 talkie maple muse-glimmer hrm_text
    """.split()  # noqa: SIM905 - a hundred names read better as text
)
_ENCODERS = frozenset(
    """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding
    llama-embed t5encoder
    """.split()  # noqa: SIM905
)
_ENCODER_DECODERS = frozenset({"t5"})
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset(
    """
    jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear
    bailingmoe3 kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01
    """.split()  # noqa: SIM905
)
_CLASSES = (
    (_DECODERS, ModelClass.DECODER),
    (_ENCODERS, ModelClass.ENCODER),
    (_ENCODER_DECODERS, ModelClass.ENCODER_DECODER),
    (_RECURRENT, ModelClass.RECURRENT),
    (_HYBRID, ModelClass.HYBRID),
)
_NEITHER = {
    "clip": "a vision or audio projector: it is loaded next to a language model, not instead of one",
    "wavtokenizer-dec": "an audio decoder, not a language model",
    "qwen3tts": "a speech model, not a language model",
    "pockettts": "a speech model, not a language model",
    "dream": "a diffusion language model, which no step-by-step generation can drive",
    "llada": "a diffusion language model, which no step-by-step generation can drive",
    "llada-moe": "a diffusion language model, which no step-by-step generation can drive",
    "rnd1": "a diffusion language model, which no step-by-step generation can drive",
    "eagle3": "a draft head, which needs the model it was made for",
    "dflash": "a draft head, which needs the model it was made for",
    "gemma4-assistant": "a draft head, which needs the model it was made for",
}


def model_class(architecture: str, *, file: str) -> ModelClass:
    """The class of an architecture.

    Raises:
        UnsupportedError: it is no language model, or one that this build does not know.
    """
    for names, found in _CLASSES:
        if architecture in names:
            return found
    reason = _NEITHER.get(architecture, "an architecture this build does not know")
    raise UnsupportedError(
        f"{file}: neither decoder, encoder nor recurrent: {architecture[:64]!r} is {reason}",
        architecture=architecture[:64],
        path=file,
    )


_VERSIONS = (2, 3)
_BIG_ENDIAN_MASK = 0xFFFF
_MAX_KEYS = 65_536
_MAX_TENSORS = 131_072
_MAX_NAME_BYTES = 63  # ggml keeps tensor names in 64 bytes
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**63 - 1
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 65_536
POOLINGS = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST, 4: Pooling.RANK}  # enum llama_pooling_type
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    Attributes:
        name: its name, unique in the model.
        shape: elements along each dimension, fastest first, 1 to 4 of them.
        type_name: ggml's name of its element type.
        offset: bytes from the start of the data section.
        size_bytes: bytes it takes there.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file (with its further shards) says of itself.

    Attributes:
        path: the file; of a split model its first shard.
        version: GGUF version.
        architecture: `general.architecture`.
        model_class: the class that follows from it (SPEC K1).
        metadata: every key; arrays as `GgufArray`, long ones without their values.
        tensors: the table of all shards.
        data_offset: bytes from the start of `path` to its data section.
        file_size: bytes of `path`.
        shards: all files of the model, `path` first.
        size_bytes: bytes of all of them.
        n_ctx_train: tokens of context the model was trained for.
        block_count: layers.
        embedding_length: width of the residual stream.
    """

    path: Path
    version: int
    architecture: str
    model_class: ModelClass
    metadata: Mapping[str, Scalar | GgufArray] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    data_offset: int
    file_size: int
    shards: tuple[Path, ...]
    size_bytes: int
    n_ctx_train: int
    block_count: int
    embedding_length: int

    @property
    def pooling(self) -> str:
        """How an encoder makes one vector of a text: mean, cls, last or rank; empty: it is no encoder.

        Mean where the file names none: one vector a text is what is served.
        """
        return "" if self.model_class is not ModelClass.ENCODER else self._named_pooling or Pooling.MEAN

    @property
    def assumes_pooling(self) -> bool:
        """Whether `pooling` is not what the file says: it names none, or says that there is none."""
        return self.model_class is ModelClass.ENCODER and self._named_pooling is None

    @property
    def _named_pooling(self) -> str | None:
        value = self.metadata.get(f"{self.architecture}.pooling_type")
        return POOLINGS.get(value) if isinstance(value, int) else None

    @property
    def outputs(self) -> tuple[str, ...]:
        """A reranker's labels of the outputs of its classifier, empty ones where the file has none."""
        if self.pooling != Pooling.RANK:
            return ()
        labels = self.metadata.get(f"{self.architecture}.classifier.output_labels")
        if not isinstance(labels, GgufArray):
            return ("",)
        return ("",) * labels.length if labels.values is None else tuple(map(str, labels.values))

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def tensor_types(self) -> frozenset[str]:
        """Names of the element types that occur."""
        return frozenset(tensor.type_name for tensor in self.tensors)

    @property
    def num_params(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def summary(self) -> str:
        """Architecture, parameters and type of weights: "llama 134.5M Q4_1"."""
        return f"{self.architecture} {params_text(self.num_params)} {self.quantisation}"

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary; 0 if the file carries none."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.length if isinstance(tokens, GgufArray) else 0

    @property
    def quantisation(self) -> str:
        """The file type it names, such as Q4_K_M, else the type that most bytes are in."""
        file_type = self.metadata.get("general.file_type")
        if isinstance(file_type, int) and file_type in FILE_TYPES:
            return FILE_TYPES[file_type]
        size_by_type: Counter[str] = Counter()
        for tensor in self.tensors:
            size_by_type[tensor.type_name] += tensor.size_bytes
        return size_by_type.most_common(1)[0][0]

    def token_text(self, token_id: int) -> str:
        """The text of a token, read from the file on demand; empty for an id outside the vocabulary."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, GgufArray) or not 0 <= token_id < tokens.length:
            return ""
        if tokens.values is not None:
            return str(tokens.values[token_id])
        with BoundedFile(self.path) as file:
            file.seek(tokens.offset)
            return file.strings(token_id + 1, "tokenizer.ggml.tokens")[token_id].decode()

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text, empty if the file names none."""
        return self._named_token("tokenizer.ggml.bos_token_id")

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text, empty if the file names none."""
        return self._named_token("tokenizer.ggml.eos_token_id")

    def _named_token(self, key: str) -> str:
        token_id = self.metadata.get(key)
        return self.token_text(token_id) if isinstance(token_id, int) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """One file's keys and tensors."""

    version: int
    metadata: dict[str, Scalar | GgufArray]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_size: int


def read_header(path: str | Path) -> GgufHeader:
    """Read and check the header of a model, and the tables of its further shards.

    Args:
        path: a GGUF file; of a split model the first shard.

    Raises:
        ModelFileError: missing, truncated, corrupt or incomplete; names the file and the reason.
        UnsupportedError: a sound file of something that is no language model of a known architecture.
    """
    path = Path(path)
    shards.refuse_partial(path)
    shards.refuse_further(path)
    with BoundedFile(path) as file:
        first = _read_layout(file)
        architecture = gguf_checks.architecture(file, first.metadata)
        found_class = model_class(architecture, file=str(path))
        paths = shards.complete(path, first.metadata)
        whole = _with_further_shards(first, paths)
        limits = gguf_checks.check(file, architecture, found_class, whole.metadata, whole.tensors)
        vocabulary_checks.check(file, whole.metadata, whole.tensors)
    return GgufHeader(
        path=path,
        version=whole.version,
        architecture=architecture,
        model_class=found_class,
        metadata=MappingProxyType(whole.metadata),
        tensors=whole.tensors,
        data_offset=whole.data_offset,
        file_size=first.file_size,
        shards=paths,
        size_bytes=whole.file_size,
        n_ctx_train=limits.context_length,
        block_count=limits.block_count,
        embedding_length=limits.embedding_length,
    )


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes lie: in which file, from which byte on."""

    name: str
    path: Path
    start: int
    size_bytes: int


def tensor_places(header: GgufHeader) -> Iterator[TensorPlace]:
    """Where each tensor lies, by the tables of all shards, which are read again. Raises ModelFileError."""
    for path in header.shards:
        with BoundedFile(path) as file:
            layout = _read_layout(file)
        for tensor in layout.tensors:
            yield TensorPlace(tensor.name, path, layout.data_offset + tensor.offset, tensor.size_bytes)


def read_tables(path: Path) -> tuple[Mapping[str, Scalar | GgufArray], tuple[TensorInfo, ...]]:
    """Keys and tensors of a file that is no model by itself, such as an adapter; only the layout is checked.

    Raises:
        ModelFileError: missing, truncated or corrupt; names the file and the reason.
    """
    with BoundedFile(path) as file:
        layout = _read_layout(file)
    return MappingProxyType(layout.metadata), layout.tensors


def _with_further_shards(first: _Layout, paths: tuple[Path, ...]) -> _Layout:
    tensors, size_bytes = list(first.tensors), first.file_size
    for number, path in enumerate(paths[1:], start=1):
        with BoundedFile(path) as file:
            layout = _read_layout(file)
        shards.check_number(path, layout.metadata, number)
        tensors += layout.tensors
        size_bytes += layout.file_size
    if len(paths) > 1:
        shards.check_tensor_count(paths[0], first.metadata, [tensor.name for tensor in tensors])
    return replace(first, tensors=tuple(tensors), file_size=size_bytes)


def _read_layout(file: BoundedFile) -> _Layout:
    version, num_tensors, num_keys = _read_counts(file)
    metadata = _read_metadata(file, num_keys)
    alignment = _alignment(file, metadata)
    tensors = tuple(_read_tensors(file, num_tensors, alignment))
    data_offset = -(-file.position // alignment) * alignment
    if tensors:
        end = data_offset + tensors[-1].offset + tensors[-1].size_bytes
        if end > file.size:
            raise file.broken(f"truncated: its tensors end at byte {end}, the file has {file.size}")
    return _Layout(
        version=version, metadata=metadata, tensors=tensors, data_offset=data_offset, file_size=file.size
    )


def _read_counts(file: BoundedFile) -> tuple[int, int, int]:
    magic = file.read(4, "the magic") if file.size >= len(b"GGUF") else b""
    if magic != b"GGUF":
        raise file.broken(f"not a GGUF file (it begins with {magic!r} and has {file.size} bytes)")
    version = file.number("I", "the version")
    if version and version & _BIG_ENDIAN_MASK == 0:
        raise file.broken("a big-endian GGUF file; convert it for this machine")
    if version not in _VERSIONS:
        raise file.broken(f"GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are read")
    num_tensors, num_keys = file.number("Q", "the tensor count"), file.number("Q", "the key count")
    left = file.size - file.position
    for count, most, smallest, what in (
        (num_tensors, _MAX_TENSORS, _SMALLEST_TENSOR, "tensors"),
        (num_keys, _MAX_KEYS, _SMALLEST_KEY, "metadata keys"),
    ):
        if count > most or count * smallest > left:
            raise file.broken(f"claims {count} {what}; {left} bytes are left and at most {most} are taken")
    if num_tensors == 0:
        raise file.broken("it holds no tensors (a vocabulary alone is no model)")
    return version, num_tensors, num_keys


def _read_metadata(file: BoundedFile, num_keys: int) -> dict[str, Scalar | GgufArray]:
    metadata: dict[str, Scalar | GgufArray] = {}
    for index in range(num_keys):
        key = file.text(f"metadata key {index}", MAX_KEY_BYTES)
        if not key or not key.isprintable():
            raise file.broken(f"metadata key {index} is {key[:64]!r}")
        if key in metadata:
            raise file.broken(f"the metadata key {key[:64]!r} occurs twice")
        gguf_type = file.number("I", f"the type of {key[:64]!r}")
        what = key[:64]
        metadata[key] = file.array(what) if gguf_type == ARRAY_TYPE else file.scalar(gguf_type, what)
    return metadata


def _alignment(file: BoundedFile, metadata: Mapping[str, Scalar | GgufArray]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int):
        raise file.broken("general.alignment is not an integer")
    # Less than 32 would put tensors where the native library's vector loads refuse them.
    if value & (value - 1) or not _DEFAULT_ALIGNMENT <= value <= _MAX_ALIGNMENT:
        raise file.broken(
            f"general.alignment is {value}, no power of two from {_DEFAULT_ALIGNMENT} to {_MAX_ALIGNMENT}"
        )
    return value


def _read_tensors(file: BoundedFile, num_tensors: int, alignment: int) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    end = 0
    for index in range(num_tensors):
        tensor = _read_tensor(file, index)
        if tensor.name in names:
            raise file.broken(f"the tensor {tensor.name!r} occurs twice")
        if tensor.offset != end:
            raise file.broken(
                f"the tensor {tensor.name!r} lies at {tensor.offset} of the data, the last one ends at {end}"
            )
        names.add(tensor.name)
        tensors.append(tensor)
        end = -(-(end + tensor.size_bytes) // alignment) * alignment
    return tensors


def _read_tensor(file: BoundedFile, index: int) -> TensorInfo:
    name = file.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
    if not name or "\0" in name:
        raise file.broken(f"tensor {index} has the name {name!r}")
    num_dims = file.number("I", f"the dimensions of {name!r}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise file.broken(f"the tensor {name!r} has {num_dims} dimensions, 1 to {_MAX_DIMS} are possible")
    shape = tuple(file.number("q", f"the shape of {name!r}") for _ in range(num_dims))
    if min(shape) < 1 or math.prod(shape) > _MAX_ELEMENTS:
        raise file.broken(f"the tensor {name!r} has the impossible shape {shape}")
    number = file.number("I", f"the type of {name!r}")
    tensor_type = TENSOR_TYPES.get(number)
    if tensor_type is None:
        raise file.broken(f"the tensor {name!r} has the unknown type {number}")
    if shape[0] % tensor_type.block_elements:
        raise file.broken(
            f"the tensor {name!r} has rows of {shape[0]}, no multiple of"
            f" {tensor_type.name}'s {tensor_type.block_elements}"
        )
    size_bytes = math.prod(shape) // tensor_type.block_elements * tensor_type.block_bytes
    offset = file.number("Q", f"the offset of {name!r}")
    return TensorInfo(name, shape, tensor_type.name, offset, size_bytes)
