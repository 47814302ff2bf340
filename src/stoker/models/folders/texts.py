"""What a model's folder says beside weights: its chat template, named tokens, and what ends a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.models.folders.json_file import broken, read_object, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_TEMPLATE_BYTES = 1 << 20
MAX_ENDS = 64
_MAX_TOKEN_CHARS = 256
_TEMPLATE_FILE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_NAMED = ("default", "chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTexts:
    """What tokenizer_config.json, generation_config.json and the files of a template say.

    Attributes:
        chat_template: Jinja source; None: there is none.
        bos_text, eos_text: named tokens, empty where none is named.
        adds_bos, adds_eos: whether they are put around a text; None: it is not said.
        eos_tokens: ids that end a text, those of generation_config.json first.
    """

    chat_template: str | None
    bos_text: str
    eos_text: str
    adds_bos: bool | None
    adds_eos: bool | None
    eos_tokens: tuple[int, ...]


def read_texts(folder: Path, config: Mapping[str, Any]) -> FolderTexts:
    """Those of a folder whose config.json says `config`.

    Raises:
        ModelFileError: a file is corrupt, or says what cannot be.
    """
    tokenizer = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    special = _optional(folder / "special_tokens_map.json")
    return FolderTexts(
        chat_template=_template(folder, tokenizer),
        bos_text=_token_text(tokenizer, special, "bos_token"),
        eos_text=_token_text(tokenizer, special, "eos_token"),
        adds_bos=_flag(tokenizer.get("add_bos_token")),
        adds_eos=_flag(tokenizer.get("add_eos_token")),
        eos_tokens=_ends(folder, generation, config),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """A file of its own comes before what the tokenizer's config says, as the library of the hub has it."""
    if (folder / _TEMPLATE_FILE).exists():
        return read_text(folder / _TEMPLATE_FILE, MAX_TEMPLATE_BYTES) or None
    source, said = folder / _TEMPLATE_JSON, None
    if source.exists():
        said = read_object(source, MAX_TEMPLATE_BYTES).get("chat_template")
    if said is None:
        source, said = folder / "tokenizer_config.json", tokenizer.get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in said if _is_named(each)}
        said = next((named[name] for name in _NAMED if name in named), next(iter(named.values()), None))
    if said is None or isinstance(said, str):
        return said or None
    raise broken(source, "chat_template is no text")


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _token_text(tokenizer: Mapping[str, Any], special: Mapping[str, Any], name: str) -> str:
    for document in (tokenizer, special):
        value = document.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and len(value) <= _MAX_TOKEN_CHARS:
            return value
    return ""


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _ends(folder: Path, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for path, said in (("generation_config.json", generation), ("config.json", config)):
        value = said.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        is_possible = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids)
        if not is_possible or len(ids) > MAX_ENDS:
            raise broken(folder / path, f"eos_token_id is {str(value)[:64]}")
        found |= dict.fromkeys(ids)
    return tuple(found)
