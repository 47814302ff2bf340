"""A folder of one of MNN's language models: what it needs, each there and whole (SPEC X1).

MNN itself loads what is there: embeddings that are cut short give noise, and its settings may name files
anywhere. So all of it is checked here, without native code, and MNN is only given settings that were checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stoker.backends.mnn.graph import Graph, read_graph
from stoker.backends.mnn.tokenizer_file import TokenizerHead, read_head
from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import Pairing
from stoker.models.fingerprint import fingerprint_of
from stoker.models.folders.json_file import broken, read_object, regular_size
from stoker.models.folders.weights import refuse_unfinished
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.txt", "tokenizer.mtok")
_BF16_BYTES = 2
_NUM_TIED = 5  # numbers of `tie_embeddings`
_MAX_WIDTH = 1 << 20
_MAX_VOCABULARY = 1 << 22
_MAX_CONTEXT = 2**31 - 1
_MAX_SHOWN = 64
_MAX_NAME = 255
UNKNOWN_CONTEXT = 8192
"""Tokens of context where the folder does not say for how many the model was trained, as most do not."""
_CONTEXT = ("max_position_embeddings", "max_seq_len", "seq_length")
_PASSED = {
    **dict.fromkeys(("hidden_size", "layer_nums", "sliding_window", "attention_mode", "quant_qkv"), int),
    **dict.fromkeys(("dynamic_option",), int),
    **dict.fromkeys(("precision", "memory", "power", "attention_mask", "attention_type"), str),
    **dict.fromkeys(("is_mrope", "attention_fused"), bool),
    **dict.fromkeys(("key_value_shape", "tie_embeddings"), list),
}
"""What of the folder's settings MNN is given, by type: how it computes, and nothing that opens a file."""
_REFUSED = {
    "has_talker": "it speaks, and text without what speaks it is not computed",
    "has_deepstack": "its layers need what its image part computes",
    "is_audio": "it listens, and MNN's binding gives no way to hand it what it heard",
}

_NO_IMAGES = "MNN's binding gives no way to hand it images: serve its GGUF file with --mmproj FILE"


@dataclass(frozen=True, kw_only=True)
class MnnFolder:
    """A sound folder.

    Attributes:
        path: the folder.
        settings: of config.json over those of llm_config.json.
        model: the graph, llm.mnn.
        weights: what lies outside of it, llm.mnn.weight.
        tokenizer: of either form.
        embeddings: None: they are read from `weights`.
        head: what the tokenizer says of itself.
        graph: what the graph says of itself.
    """

    path: Path
    settings: Mapping[str, Any] = field(repr=False)
    model: Path
    weights: Path
    tokenizer: Path
    embeddings: Path | None
    head: TokenizerHead = field(repr=False)
    graph: Graph = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> MnnFolder:
        """Read and check the folder at `path`.

        Raises:
            ModelFileError: it is missing, unfinished, incomplete, corrupt or foreign; names every file that
                is missing, or the one that is wrong.
            UnsupportedError: it holds a model of a kind that is not served.
        """
        if not path.is_dir():
            raise broken(path, "no such folder of a model")
        try:
            refuse_unfinished(path)
            settings = _read_settings(path)
            files = _files(path, settings)
            if missing := [name for name, file in files.items() if not file.exists()]:
                raise _incomplete(path, missing)
            for name, file in files.items():
                if not regular_size(file):
                    raise broken(file, f"it is empty, {name} of a model cannot be")
            head, graph = read_head(files["tokenizer"]), read_graph(files["llm_model"])
        except OSError as error:
            raise broken(path, f"cannot be read: {error.strerror or error}") from error
        found = cls(
            path=path,
            settings=settings,
            model=files["llm_model"],
            weights=files["llm_weight"],
            tokenizer=files["tokenizer"],
            embeddings=files.get("embedding_file"),
            head=head,
            graph=graph,
        )
        found._check()
        return found

    @property
    def architecture(self) -> str:
        """Its model_type; "mnn" where it does not say, as older exports do not."""
        value = self.settings.get("model_type")
        is_name = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_SHOWN
        return str(value) if is_name else "mnn"

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self._whole("hidden_size", 1, _MAX_WIDTH)

    @property
    def num_layers(self) -> int:
        """Layers with keys and values, as many as the graph has attentions."""
        return self.graph.num_attentions

    @property
    def kv_width(self) -> int:
        """Keys of a token in one layer; that of the whole width where the folder does not say."""
        shape = self.settings.get("key_value_shape")
        if isinstance(shape, list) and len(shape) > 1 and all(isinstance(one, int) for one in shape):
            heads, size = shape[-2:]
            if 0 < heads * size <= self.width:
                return int(heads * size)
        return self.width

    @property
    def context_length(self) -> int:
        """Tokens it was trained for; 0: it does not say."""
        for name in _CONTEXT:
            if self.settings.get(name) is not None:
                return self._whole(name, 1, _MAX_CONTEXT)
        return 0

    @property
    def n_vocab(self) -> int:
        """Rows of its embeddings; 0: only a load tells."""
        if self.embeddings is None or self._tied is not None:
            return self.head.n_vocab
        return regular_size(self.embeddings) // (_BF16_BYTES * self.width)

    @property
    def has_vision(self) -> bool:
        """Whether there is a part of it that looks at images."""
        return self.settings.get("is_visual") is True

    @property
    def pairing(self) -> Pairing:
        """How it stands with images: only text of it is computed."""
        return Pairing.TEXT_ONLY if self.has_vision else Pairing.NONE

    @property
    def pairing_reason(self) -> str:
        """Why it sees nothing; empty: it was not made to see."""
        return _NO_IMAGES if self.has_vision else ""

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja chat template."""
        return self._jinja("chat_template") or None

    @property
    def bos_text(self) -> str:
        """What a conversation's layout calls its first token."""
        return self._jinja("bos")

    @property
    def eos_text(self) -> str:
        """What a conversation's layout calls the last token of a turn."""
        return self._jinja("eos")

    @property
    def files(self) -> tuple[Path, ...]:
        """All that a load reads, config.json first."""
        parts = (self.path / CONFIG, self.tokenizer, self.model, self.weights)
        return parts if self.embeddings is None else (*parts, self.embeddings)

    @property
    def size_bytes(self) -> int:
        """Bytes of these files."""
        return sum(each.stat().st_size for each in self.files)

    @property
    def weight_bytes(self) -> int:
        """What lies in memory of them once it is loaded: embeddings are read from disk, row by row."""
        return self.model.stat().st_size + self.weights.stat().st_size

    @property
    def quantisation(self) -> str:
        """Bits of an average weight, as a column shows them, where the embeddings tell the vocabulary."""
        return {16: "BF16", 8: "8-bit", 4: "4-bit"}.get(self._tied[3], "") if self._tied else ""

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal, another one for another folder under the same path."""
        return fingerprint_of(self.files)

    def native_settings(self) -> dict[str, Any]:
        """What MNN is told of it; files go by the names that `links` has them under."""
        told = {
            name: value
            for name, kind in _PASSED.items()
            if isinstance(value := self.settings.get(name), kind)
        }
        return (
            told
            | {"is_visual": False, "use_template": False}
            | {name: link for name, link in _LINKS.items() if name != "embedding_file" or self.embeddings}
        )

    def links(self) -> dict[str, Path]:
        """The files by the names that MNN is told."""
        files = {"llm_model": self.model, "llm_weight": self.weights, "tokenizer_file": self.tokenizer}
        if self.embeddings is not None:
            files["embedding_file"] = self.embeddings
        return {_LINKS[name]: file for name, file in files.items()}

    @cached_property
    def _tied(self) -> list[int] | None:
        """Place and size of the rows and of their scales, bits of a weight, weights a scale."""
        tied = self.settings.get("tie_embeddings")
        if not isinstance(tied, list) or len(tied) != _NUM_TIED:
            return None
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in tied):
            raise broken(self.path, f"tie_embeddings is {str(tied)[:_MAX_SHOWN]}, whole numbers are possible")
        return tied

    def _jinja(self, name: str) -> str:
        part = self.settings.get("jinja")
        value = part.get(name) if isinstance(part, dict) else None
        return value if isinstance(value, str) else ""

    def _whole(self, name: str, low: int, high: int) -> int:
        value = self.settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            shown = "missing" if value is None else str(value)[:_MAX_SHOWN]
            raise broken(self.path, f"{name} is {shown}, a whole number of {low} to {high} is needed")
        return value

    def _check(self) -> None:
        """Raise where what the files say of each other does not hold."""
        for name, reason in _REFUSED.items():
            if self.settings.get(name) is True:
                raise UnsupportedError(f"{self.path}: {reason} ({name})", param="model")
        if str(self.settings.get("attention_mask", "float")).startswith("glm"):
            text = "its positions count from the end of the prompt, which steps of slices cannot follow"
            raise UnsupportedError(f"{self.path}: {text} (attention_mask)", param="model")
        if self.graph.has_states:
            text = "its layers keep states (linear attention), and MNN's binding takes no token of those back"
            raise UnsupportedError(f"{self.path}: {text}", param="model")
        self._check_embeddings()
        size = regular_size(self.weights)
        if self.graph.end_of_weights > size:
            raise broken(
                self.weights,
                f"it has {size_text(size)}, the weights that {self.model.name} names end at"
                f" {size_text(self.graph.end_of_weights)}: it is cut short, or another model's",
            )

    def _check_embeddings(self) -> None:
        if self._tied is not None:
            file = self.embeddings or self.weights
            begin, scales, scale_bytes = self._tied[:3]
            if begin > scales or scales + scale_bytes > regular_size(file):
                text = f"its embeddings end at {scales + scale_bytes} of {regular_size(file)} bytes"
                raise broken(file, f"{text}: it is cut short, or another model's")
        elif self.embeddings is not None:
            row, size = _BF16_BYTES * self.width, regular_size(self.embeddings)
            rows = size // row
            if size % row or not self.head.n_vocab <= rows <= _MAX_VOCABULARY:
                raise broken(
                    self.embeddings,
                    f"it has {size} bytes, {self.head.n_vocab} tokens of {row} are needed at the least:"
                    " it is cut short, or another model's",
                )


_LINKS = {
    "llm_model": "llm.mnn",
    "llm_weight": "llm.mnn.weight",
    "tokenizer_file": "tokenizer",
    "embedding_file": "embeddings.bin",
}


def _read_settings(path: Path) -> dict[str, Any]:
    """Those of config.json over those of the file that it names."""
    if not (path / CONFIG).exists():
        raise _incomplete(path, [CONFIG])
    outer = read_object(path / CONFIG)
    inner = _named(path, outer, "llm_config", "llm_config.json")
    if not inner.exists():
        missing = ["llm_config"] + [name for name, file in _files(path, outer).items() if not file.exists()]
        raise _incomplete(path, missing)
    return read_object(inner) | outer


def _files(path: Path, settings: Mapping[str, Any]) -> dict[str, Path]:
    """What a load opens, by the names of the settings."""
    tokenizer = _named(path, settings, "tokenizer_file", TOKENIZERS[0])
    if "tokenizer_file" not in settings and not tokenizer.exists() and (path / TOKENIZERS[1]).exists():
        tokenizer = path / TOKENIZERS[1]
    files = {
        "llm_model": _named(path, settings, "llm_model", "llm.mnn"),
        "llm_weight": _named(path, settings, "llm_weight", "llm.mnn.weight"),
        "tokenizer": tokenizer,
    }
    tied = settings.get("tie_embeddings")
    is_tied = isinstance(tied, list) and len(tied) == _NUM_TIED and tied[0] != 0
    if not is_tied:
        files["embedding_file"] = _named(path, settings, "embedding_file", "embeddings_bf16.bin")
    return files


def _named(path: Path, settings: Mapping[str, Any], setting: str, usual: str) -> Path:
    """The file of a setting, which lies in the folder itself."""
    name = settings.get(setting, usual)
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME
    if not is_name or "/" in name or "\\" in name or name in {".", ".."}:
        shown = str(name)[:_MAX_SHOWN]
        raise broken(path / CONFIG, f"{setting} is {shown!r}, the name of a file in the folder is needed")
    return path / str(name)


_PARTS = {
    CONFIG: f"{CONFIG} (how it is computed)",
    "llm_config": "llm_config.json (what the model is)",
    "llm_model": "llm.mnn (the graph)",
    "llm_weight": "llm.mnn.weight (the weights)",
    "tokenizer": f"{TOKENIZERS[0]} or {TOKENIZERS[1]} (the vocabulary)",
    "embedding_file": "embeddings_bf16.bin (the embeddings)",
}


def _incomplete(path: Path, missing: list[str]) -> ModelFileError:
    text = ", ".join(_PARTS[name] for name in missing)
    error = broken(path, f"it is no whole folder of MNN, it lacks {text}")
    error.details["missing"] = missing
    return error
