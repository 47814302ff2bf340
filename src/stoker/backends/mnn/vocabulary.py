"""The vocabulary of a loaded model, by MNN's own tokenizer.

The native tokenizer reads control tokens wherever they are spelled, ends a text at its first NUL, crashes on
half a character and, in one form, copies what is left of a text for each of its tokens. So the first two are
refused here, and it gets texts in pieces: cut where control tokens are not to be read and where they are
long. The interpreter's lock is held within its calls, which makes them safe from several threads; between two
pieces others go on.
"""

from __future__ import annotations

import re
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from stoker.backends.mnn.tokenizer_file import TokenizerForm
from stoker.errors import InvalidRequestError, NotReadyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.backends.mnn.folder import MnnFolder

MAX_PIECE_CHARS = 2048
"""A match of one form's regular expression takes up to 512 bytes of stack a character: a MiB."""
_WORD_BEGIN = re.compile(r"(?<=\S) (?=\S)")
_BLANKS = b" \t\n\v\f\r"


class NativeTokenizer(Protocol):
    """What of MNN's binding reads and spells tokens."""

    def tokenizer_encode(self, text: str) -> list[int]:
        """Tokens of a text, the prefix before them."""
        ...

    def tokenizer_decode(self, token: int) -> str:
        """Spelling of a token; UnicodeDecodeError holds the bytes of one that is no text of its own."""
        ...


class MnnVocabulary:
    """Tokens of a model.

    Args:
        native: its binding.
        folder: what its files say.
        n_vocab: rows of logits; there may be more than tokens.
    """

    def __init__(self, native: NativeTokenizer, folder: MnnFolder, n_vocab: int) -> None:
        self._tokenizer: NativeTokenizer | None = native
        self._head = folder.head
        self._texts = (folder.bos_text, folder.eos_text)
        self.n_vocab = n_vocab
        self.chat_template = folder.chat_template
        self.eog_tokens = tuple(token for token in folder.head.ends if token < n_vocab)
        self._eog = frozenset(self.eog_tokens)
        self._control = frozenset((*folder.head.specials, *folder.head.ends))
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        return f"<MnnVocabulary of {self.n_vocab} tokens, {self._head.form.name.lower()}>"

    def close(self) -> None:
        """Let go of the model, which would else stay as long as anybody has its vocabulary; idempotent."""
        self._tokenizer = None

    @property
    def _native(self) -> NativeTokenizer:
        if self._tokenizer is None:
            raise NotReadyError("the model was unloaded, its tokenizer with it")
        return self._tokenizer

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError where it is no valid Unicode, or holds a NUL."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
        if (place := text.find("\0")) >= 0:
            reason = f"the text holds a NUL at character {place}, where MNN's tokenizer would end it"
            raise InvalidRequestError(reason, param="prompt")
        tokens = list(self._head.prefix) if add_special else []
        for piece in self._pieces_of(text, parse_special=parse_special):
            tokens += self._encoded(piece)
        return tokens

    def least_tokens(self, text: str, enough: int) -> int:
        """Tokens that `text` has at the least: its bytes by those of the longest token.

        Of a tokenizer that may change texts before it cuts them nothing is sure, of one that may drop blanks
        the others count.
        """
        if not self._head.keeps_bytes:
            return 0
        most = enough * self._longest + 1
        begin = text[: most + 1].encode(errors="replace")
        is_exact = self._head.form in {TokenizerForm.TIKTOKEN, TokenizerForm.HUGGINGFACE}
        count = len(begin) if is_exact else sum(byte not in _BLANKS for byte in begin)
        return -(-count // self._longest)

    def pair(self, query: str, document: str) -> list[int]:
        """One after the other; MNN's tokenizers have no layout for pairs."""
        first, second = (
            self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)
        )
        return [*self._head.prefix, *first, *second]

    def piece(self, token: int) -> bytes:
        """The bytes a generated token adds to the text; empty for control tokens."""
        spelled = self.special_piece(token)
        return b"" if token in self._control else spelled

    def special_piece(self, token: int) -> bytes:
        """Like `piece`, with control tokens spelled out."""
        if not 0 <= token < self.n_vocab:
            raise InvalidRequestError(f"token {token} is not in 0 .. {self.n_vocab - 1}", param="tokens")
        return self._spelled[token]

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self._eog

    @property
    def added_bos(self) -> int | None:
        """The token that `add_special` puts before every text; None: it puts none there."""
        return self._head.prefix[0] if self._head.prefix else None

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text, empty if there is none."""
        bos = self.added_bos
        return self._texts[0] or ("" if bos is None else self.special_piece(bos).decode(errors="replace"))

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text, empty if there is none."""
        ends = self.eog_tokens
        return self._texts[1] or (self.special_piece(ends[0]).decode(errors="replace") if ends else "")

    @cached_property
    def _spelled(self) -> list[bytes]:
        with self._reading:  # threads that read every token side by side keep each other from going on
            return [self._fetch(token) for token in range(self.n_vocab)]

    def _fetch(self, token: int) -> bytes:
        try:
            return self._native.tokenizer_decode(token).encode()
        except UnicodeDecodeError as error:
            return bytes(error.object)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token; SentencePiece spells a blank with three."""
        longest = max(map(len, self._spelled), default=1)
        return max(1, longest)

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        """Finds each spelling of a control token, those within and across others too."""
        spelled = {
            self._spelled[token].decode(errors="replace") for token in self._control if token < self.n_vocab
        }
        texts = sorted(filter(None, spelled), key=len, reverse=True)
        return re.compile(f"(?=({'|'.join(map(re.escape, texts))}))" if texts else r"(?!)")

    def _pieces_of(self, text: str, *, parse_special: bool) -> Iterator[str]:
        """The text in pieces that the native code reads quickly, and only as much into as it may."""
        places = (
            set() if parse_special else {found.start() + 1 for found in self._special_texts.finditer(text)}
        )
        begin = 0
        for end in (*sorted(places), len(text)):
            yield from self._short(text[begin:end], parse_special=parse_special)
            begin = end

    def _short(self, text: str, *, parse_special: bool) -> Iterator[str]:
        begin = 0
        while len(text) - begin > MAX_PIECE_CHARS:
            window = text[begin : begin + MAX_PIECE_CHARS]
            found = [match.start() for match in _WORD_BEGIN.finditer(window)]
            size = found[-1] if found else MAX_PIECE_CHARS
            if parse_special and not found:
                size = self._clear_of_specials(text, begin, size)
            yield text[begin : begin + size]
            is_blank_read = (
                found and self._head.form is TokenizerForm.SENTENCEPIECE
            )  # it begins with one anyway
            begin += size + bool(is_blank_read)
        if begin < len(text):
            yield text[begin:]

    def _clear_of_specials(self, text: str, begin: int, size: int) -> int:
        """`size`, or less where a control token would be cut in two."""
        longest = max(map(len, self._special_texts.pattern.split("|")))
        near = text[begin + max(0, size - longest) : begin + size + longest]
        shift = max(0, size - longest)
        for found in self._special_texts.finditer(near):
            start, end = shift + found.start(), shift + found.start() + len(found[1])
            if start < size < end:
                return max(1, start)
        return size

    def _encoded(self, piece: str) -> list[int]:
        """Tokens of a piece without the prefix and what else MNN puts around each text."""
        tokens = self._native.tokenizer_encode(piece)
        before, after = self._around
        return tokens[before : len(tokens) - after]

    @cached_property
    def _around(self) -> tuple[int, int]:
        """How many tokens MNN puts before a text, and how many after it."""
        added = self._native.tokenizer_encode("")
        prefix = len(self._head.prefix)
        return (prefix, len(added) - prefix) if len(added) >= prefix else (len(added), 0)
