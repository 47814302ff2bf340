"""The tokenizer of a folder's model, by the library `tokenizers`: no native code of MLX is needed for it.

The library encodes a batch outside of the interpreter's lock and a single text within it, so a text is a
batch of one. Which tokens are control tokens the file says; which of them end a text is in `ends`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stoker.backends.mlx.text.ends import ends_of
from stoker.backends.mlx.text.floor import floor_of
from stoker.backends.mlx.text.pieces import Pieces
from stoker.errors import InvalidRequestError, ModelFileError
from stoker.models.folders.folder import TOKENIZER

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import AddedToken, Tokenizer

    from stoker.backends.token_floor import TokenFloor
    from stoker.models.folders.folder import ModelFolder

MAX_TEXT_BYTES = 2**31 - 1
_PROBE = "a"


class FolderVocabulary:
    """Tokens of a folder's model. Immutable after it is made; safe to use from several threads.

    Raises:
        ModelFileError: tokenizer.json is none that the library reads.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._path = folder.path / TOKENIZER
        self._texts = folder.texts
        self.n_vocab = folder.settings.n_vocab
        self._parsing = _opened(self._path)
        self._added: dict[int, AddedToken] = self._parsing.get_added_tokens_decoder()
        ids = self._parsing.get_vocab(with_added_tokens=True)
        self._spelled = {number: text for text, number in ids.items()}
        self._ids = ids
        self._pieces = Pieces(_state(self._parsing.decoder))
        self._eog = tuple(
            token for token in ends_of(folder.texts, ids, self._added) if 0 <= token < self.n_vocab
        )
        self._eog_set = frozenset(self._eog)

    def __repr__(self) -> str:
        return f"<FolderVocabulary of {self.n_vocab} tokens>"

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        Raises:
            InvalidRequestError: it is no valid Unicode, or spells a token that the model has no row for.
        """
        tokens = self._encoded(text, self._parsing if parse_special else self._plain)
        if not add_special:
            return tokens
        before, after = self._surrounding
        return [*before, *tokens, *after]

    def least_tokens(self, text: str, enough: int) -> int:
        """Tokens that `text` has at the least, without tokenising it; exact no further than `enough`."""
        return self._floor.least(text, enough)

    def pair(self, query: str, document: str) -> list[int]:
        """A query and a document with what the tokenizer puts around and between them."""
        for text in (query, document):
            _check(text)
        encoded = self._plain.encode_batch_fast([(query, document)], add_special_tokens=True)
        return self._known(encoded[0].ids)

    def piece(self, token: int) -> bytes:
        """The bytes a generated token adds to the text; empty for control tokens."""
        added = self._added.get(token)
        return b"" if added is not None and added.special else self.special_piece(token)

    def special_piece(self, token: int) -> bytes:
        """Like `piece`, with control tokens spelled out; empty for rows that no token has."""
        if not 0 <= token < self.n_vocab:
            text = f"token {token} is not one of the model's {self.n_vocab}"
            raise InvalidRequestError(text, param="prompt")
        added = self._added.get(token)
        if added is not None:
            return str(added.content).encode()
        spelled = self._spelled.get(token)
        return b"" if spelled is None else self._pieces.bytes_of(spelled)

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self._eog_set

    @property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return self._eog

    @property
    def added_bos(self) -> int | None:
        """The token that `add_special` puts before every text; None: it puts none there."""
        before, _ = self._surrounding
        return before[0] if before else None

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text, empty if there is none."""
        return self._texts.bos_text

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text, empty if there is none."""
        if self._texts.eos_text or not self._texts.eos_tokens:
            return self._texts.eos_text
        text: str = self._spelled.get(self._texts.eos_tokens[0], "")
        return text

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        return self._texts.chat_template

    # ---- how

    @cached_property
    def _plain(self) -> Tokenizer:
        """One for which control tokens are text like any other: the library keeps that with the tokenizer."""
        plain = _opened(self._path)
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _floor(self) -> TokenFloor:
        tokenizer = self._parsing
        return floor_of(
            tokenizer.model,
            [_state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)],
            [self.special_piece(token) for token in self._spelled if token < self.n_vocab],
            list(self._added.values()),
            self._pieces.spelling,
        )

    @cached_property
    def _surrounding(self) -> tuple[list[int], list[int]]:
        """What `add_special` puts before a text, and what after it; the flags of the config decide first."""
        inner = self._encoded(_PROBE, self._parsing)
        outer = self._parsing.encode_batch_fast([_PROBE], add_special_tokens=True)[0].ids
        spare = range(len(outer) - len(inner) + 1)
        at = next((at for at in spare if outer[at : at + len(inner)] == inner), 0)
        before, after = outer[:at], outer[at + len(inner) :]
        return (
            self._said(before, self._texts.bos_text, adds=self._texts.adds_bos),
            self._said(after, self._texts.eos_text, adds=self._texts.adds_eos),
        )

    def _said(self, found: list[int], text: str, *, adds: bool | None) -> list[int]:
        token = self._ids.get(text)
        if adds is None or token is None:
            return found
        without = [each for each in found if each != token]
        return [*without, token] if adds else without

    def _encoded(self, text: str, tokenizer: Tokenizer) -> list[int]:
        _check(text)
        try:
            found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:
            raise InvalidRequestError(f"the tokenizer refuses the text: {error}", param="prompt") from error
        return self._known(found)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if tokens and max(tokens) >= self.n_vocab:
            token = max(tokens)
            text = f"the text spells the token {self._spelled.get(token, '')[:64]!r} ({token})"
            raise InvalidRequestError(f"{text}, of which the model knows nothing", param="prompt")
        return list(tokens)


def _check(text: str) -> None:
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
    if size > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"the text has {size} bytes, at most {MAX_TEXT_BYTES} fit", param="prompt")


def _opened(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - an optional library

    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None  # that is for training
        tokenizer.encode_batch_fast([_PROBE], add_special_tokens=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        text = f"{path}: no tokenizer that can be read: {str(error)[:200]}"
        raise ModelFileError(text, path=str(path)) from error
    return tokenizer


def _state(step: Any) -> dict[str, Any] | None:
    """A step of the pipeline as tokenizer.json has it."""
    if step is None:
        return None
    found = json.loads(step.__getstate__())
    return found if isinstance(found, dict) else None
