"""Which files of a hub repository a reference such as `owner/repo:Q4_K_M` means. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError, ModelNotFoundError
from stoker.models.shards import shard_names

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# First match wins: good for its size first, then the safe larger ones, then whatever there is.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_", "IQ4_", "Q5_K_M", "Q5_", "Q6_K", "Q8_0", "F16", "BF16")
# A projector, an importance matrix or a draft head is no model of its own.
_COMPANION = re.compile(r"(^|[/._-])(mmproj|imatrix|mtp|vocab)([._-]|$)", re.IGNORECASE)
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository; `selector` is a file name, a quantisation, or empty for a sensible choice."""

    repo: str
    selector: str = ""

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read `REPO`, `REPO:FILE` or `REPO:QUANT`. Raises InvalidRequestError on anything else."""
        repo, _, selector = text.strip().partition(":")
        if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
            raise InvalidRequestError(
                f"{text[:200]!r} is no model reference; write OWNER/REPO[:FILE] or OWNER/REPO:Q4_K_M"
            )
        if selector:
            check_file_name(selector)
        return cls(repo, selector)

    def choose(self, names: Sequence[str]) -> tuple[str, ...]:
        """The files to get out of a repository's, all shards of a split model, the first one first.

        Raises:
            ModelNotFoundError: there is no such file; lists what there is.
        """
        files = sorted(name for name in names if name.lower().endswith(".gguf"))
        chosen = self._pick(files)
        if chosen is None:
            shown = ", ".join(files[:_NAMES_SHOWN]) + (", ..." if len(files) > _NAMES_SHOWN else "")
            wanted = f"no GGUF file that matches {self.selector!r}" if self.selector else "no GGUF file"
            raise ModelNotFoundError(
                f"{self.repo} has {wanted}; it has: {shown or 'none at all'}", repo=self.repo
            )
        folder, slash, name = chosen.rpartition("/")
        shards = tuple(folder + slash + each for each in shard_names(name))
        missing = [each for each in shards if each not in files]
        if missing:
            raise ModelNotFoundError(f"{self.repo} lacks the shard {missing[0]}", repo=self.repo)
        return shards

    def _pick(self, files: list[str]) -> str | None:
        folded = {name.casefold(): name for name in files}
        wanted = self.selector.casefold()
        if wanted in folded:
            return folded[wanted]
        models = [name for name in files if not _COMPANION.search(name)]
        if self.selector:
            by_name = [name for name in files if name.rpartition("/")[2].casefold() == wanted]
            return next(
                iter(by_name or [name for name in models if _is_quantised(name, self.selector)]), None
            )
        for label in _PREFERRED:
            for name in models:
                if _is_quantised(name, label):
                    return name
        return models[0] if models else None


def check_file_name(name: str) -> None:
    """Raise InvalidRequestError for a name that would leave the folder it is put in."""
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise InvalidRequestError(f"{name[:200]!r} is no file name inside a repository")


def _is_quantised(name: str, label: str) -> bool:
    tail = "" if label.endswith("_") else r"(?![A-Za-z0-9_])"
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(label)}{tail}", name, re.IGNORECASE) is not None


def is_reference(text: str) -> bool:
    """Whether a text could name a repository of the hub."""
    try:
        HubReference.parse(text)
    except InvalidRequestError:
        return False
    return True
