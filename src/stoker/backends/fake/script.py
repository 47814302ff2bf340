"""Answers that the fake backend gives word for word, so that what is shown of them can be tested.

Owns the file they stand in: one answer for each turn of a conversation, a form feed between them; behind the
last the first follows again. A byte is a token, so the backend takes the next byte for the likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.fake.vocabulary import CHATML, EOS, IM_START
from stoker.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPENING = list(b"assistant\n")
_BETWEEN = b"\f"
_REASONS = b"</think>"
_MARK = "{# a model that reasons: <think></think> #}"


@dataclass(frozen=True, slots=True)
class FakeScript:
    """The answers of a file."""

    answers: tuple[bytes, ...]

    @classmethod
    def read(cls, path: str) -> FakeScript:
        """Those of the file. Raises ModelFileError where it cannot be read."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}", path=path) from None
        return cls(tuple(text.split(_BETWEEN)))

    @property
    def chat_template(self) -> str:
        """ChatML; of a script that holds reasoning, one by which reasoning is looked for."""
        return CHATML + (_MARK if any(_REASONS in answer for answer in self.answers) else "")

    def next_token(self, tokens: Sequence[int]) -> int:
        """What follows a conversation that is laid out in ChatML; EOS where no answer is begun."""
        turns = [at for at, token in enumerate(tokens) if token == IM_START]
        opened = [at for at in turns if list(tokens[at + 1 : at + 1 + len(_OPENING)]) == _OPENING]
        if not opened or opened[-1] != turns[-1]:
            return EOS
        answer = self.answers[(len(opened) - 1) % len(self.answers)]
        at = len(tokens) - opened[-1] - 1 - len(_OPENING)
        return answer[at] if at < len(answer) else EOS
