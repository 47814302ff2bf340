"""The vocabulary of the fake backend: UTF-8 bytes are tokens, and a few control tokens follow them."""

from __future__ import annotations

import re

from stoker.errors import InvalidRequestError

NUM_BYTES = 256
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = range(NUM_BYTES, NUM_BYTES + len(SPECIALS))
N_VOCAB = NUM_BYTES + len(SPECIALS)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(text) for text in SPECIALS) + ")")


class FakeVocabulary:
    """Token ids 0 .. 255 are bytes, 256 .. 259 are BOS, EOS, im_start and im_end.

    Args:
        chat_template: Jinja source.
        shift: by how much the id of each byte is further, as if it were another vocabulary.
    """

    def __init__(self, chat_template: str = CHATML, shift: int = 0) -> None:
        self._chat_template = chat_template
        self._shift = shift
        self._ids = bytes((byte + shift) % NUM_BYTES for byte in range(NUM_BYTES))

    def __repr__(self) -> str:
        return f"<FakeVocabulary of {N_VOCAB} tokens>"

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """One token a UTF-8 byte; `add_special` puts BOS first, `parse_special` reads control tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
        tokens = [BOS] if add_special else []
        for part in _SPECIAL_PATTERN.split(text) if parse_special else [text]:
            if parse_special and part in SPECIALS:
                tokens.append(NUM_BYTES + SPECIALS.index(part))
            else:
                tokens.extend(part.encode().translate(self._ids))
        return tokens

    def least_tokens(self, text: str, enough: int) -> int:  # noqa: ARG002 - it is one division
        """As many as there were if all were the longest control token."""
        return len(text) // max(map(len, SPECIALS))

    def pair(self, query: str, document: str) -> list[int]:
        """BOS, the query, EOS, the document."""
        first, second = (
            self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)
        )
        return [BOS, *first, EOS, *second]

    def piece(self, token: int) -> bytes:
        """The byte; empty for control tokens."""
        text = self.special_piece(token)
        return text if token < NUM_BYTES else b""

    def special_piece(self, token: int) -> bytes:
        """The byte, or the control token's spelling."""
        if not 0 <= token < N_VOCAB:
            raise InvalidRequestError(f"token {token} is not in 0 .. {N_VOCAB - 1}", param="tokens")
        byte = (token - self._shift) % NUM_BYTES
        return bytes([byte]) if token < NUM_BYTES else SPECIALS[token - NUM_BYTES].encode()

    def is_eog(self, token: int) -> bool:
        """Whether it is EOS or im_end."""
        return token in (EOS, IM_END)

    @property
    def eog_tokens(self) -> tuple[int, ...]:
        """EOS and im_end."""
        return EOS, IM_END

    @property
    def added_bos(self) -> int | None:
        """BOS."""
        return BOS

    @property
    def bos_text(self) -> str:
        """The spelling of BOS."""
        return SPECIALS[0]

    @property
    def eos_text(self) -> str:
        """The spelling of EOS."""
        return SPECIALS[1]

    @property
    def chat_template(self) -> str | None:
        """ChatML, if nothing else was given."""
        return self._chat_template
