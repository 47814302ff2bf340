"""A model's folder: config.json, safetensors and a tokenizer, each there and whole before a load.

What it takes in memory is in `estimate`, which classes there are in `classes`. Which folders a backend can
compute is the backend's to say.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stoker.models.fingerprint import fingerprint_of
from stoker.models.folders.config import FolderConfig
from stoker.models.folders.json_file import MAX_TOKENIZER_BYTES, broken, read_object, regular_size
from stoker.models.folders.texts import FolderTexts, read_texts
from stoker.models.folders.weights import read_weights, refuse_unfinished
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stoker.models.folders.config import Quantisation
    from stoker.models.folders.tensors import FolderTensor

CONFIG, TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A sound folder.

    Attributes:
        path: the folder.
        settings: what config.json says.
        texts: chat template, named tokens, ends.
        weight_files: in the order of their names.
        tensors: of all of them, by name.
    """

    path: Path
    settings: FolderConfig = field(repr=False)
    texts: FolderTexts = field(repr=False)
    weight_files: tuple[Path, ...] = field(repr=False)
    tensors: Mapping[str, FolderTensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Read and check the folder at `path`.

        Raises:
            ModelFileError: it is missing, unfinished, incomplete, corrupt or foreign; names file and reason.
        """
        if not path.is_dir():
            raise broken(path, "no such folder of a model")
        try:
            refuse_unfinished(path)
            if not (path / CONFIG).exists():
                raise broken(path, f"it has no {CONFIG}: it is no folder of a model")
            settings = FolderConfig(path / CONFIG, read_object(path / CONFIG))
            _ = settings.model_type
            files, tensors = read_weights(path)
            _check_tokenizer(path)
            texts = read_texts(path, settings.text)
        except OSError as error:
            raise broken(path, f"cannot be read: {error.strerror or error}") from error
        return cls(
            path=path, settings=settings, texts=texts, weight_files=files, tensors=MappingProxyType(tensors)
        )

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as it stands."""
        return self.settings.document

    @property
    def architecture(self) -> str:
        """Its model_type."""
        return self.settings.model_type

    @property
    def quantisation(self) -> Quantisation | None:
        """How its matrices are stored; None: as floating-point numbers."""
        return self.settings.quantisation

    @property
    def quantisation_label(self) -> str:
        """As a column shows it: "4-bit", or the type that most bytes are in."""
        if self.quantisation is not None:
            return self.quantisation.label
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.size_bytes
        return sizes.most_common(1)[0][0]

    @property
    def num_params(self) -> int:
        """Weights of the model; of quantised matrices those that they stand for."""
        bits = self.quantisation.bits if self.quantisation else 0
        return sum(
            math.prod(tensor.shape) * 32 // bits
            if bits and tensor.dtype == "U32"
            else math.prod(tensor.shape)
            for name, tensor in self.tensors.items()
            if not bits or not name.endswith((".scales", ".biases"))
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of the folder itself."""
        return sum(each.stat().st_size for each in self.path.iterdir() if each.is_file())

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, as generation_config.json and config.json say."""
        return self.texts.eos_tokens

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja chat template."""
        return self.texts.chat_template

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal, another one for other weights, another config or another tokenizer."""
        return fingerprint_of([self.path / CONFIG, self.path / TOKENIZER, *self.weight_files])


def _check_tokenizer(folder: Path) -> None:
    path = folder / TOKENIZER
    if not path.exists():
        found = "tokenizer.model" if (folder / "tokenizer.model").exists() else ""
        text = f"; {found} alone is not read, transformers' AutoTokenizer writes one from it" if found else ""
        raise broken(folder, f"it has no {TOKENIZER}{text}")
    size = regular_size(path)
    if not 0 < size <= MAX_TOKENIZER_BYTES:
        raise broken(path, f"it has {size_text(size)}, up to {size_text(MAX_TOKENIZER_BYTES)} are taken")
