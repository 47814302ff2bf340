"""Texts that cannot fit, told by their length alone: before they are tokenised, which takes time and memory.

Pure. How few tokens a text may have is the vocabulary's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import ContextLengthError, InvalidRequestError
from stoker.ipc.request import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Vocabulary

QUICK_CHARS = 2**14
"""A shorter text is tokenised in some hundredths of a second: it is not looked at beforehand."""
MAX_CHARS_PER_TOKEN = 1024
"""Characters a token of the context may stand for; more are refused whatever they are. A vocabulary may merge
any number of blanks or unknown characters into one token, so that no count of its tokens bounds a text."""
SHIFTED_CONTEXTS = 4
"""Contexts that a prompt may fill where the oldest tokens are dropped."""
MAX_QUESTION_CHARS = 2**21
MAX_QUESTION_TOKENS = 2**20


def most_tokens(request: GenerateRequest, n_ctx: int) -> int:
    """Tokens that a request's prompt may have in a context of `n_ctx`."""
    if request.context_shift and request.prompt_logprobs is None and request.state_output is None:
        return max(SHIFTED_CONTEXTS * n_ctx, QUICK_CHARS)
    return n_ctx


@dataclass(frozen=True, slots=True)
class TextBound:
    """What a text has to fit into.

    Attributes:
        n_ctx: tokens of the model's context.
        most: tokens that the text may have.
        what: names the text in messages.
        param: the field it came in.
    """

    n_ctx: int
    most: int
    what: str = "the prompt"
    param: str = "prompt"

    def check(self, texts: Iterable[str], vocabulary: Vocabulary) -> None:
        """Raises ContextLengthError where `texts` have more than `most` tokens together for sure."""
        max_chars = max(QUICK_CHARS, self.most * MAX_CHARS_PER_TOKEN)
        num_chars = num_least = 0
        for text in texts:
            num_chars += len(text)
            if num_chars > max_chars:
                raise ContextLengthError.over_chars(
                    self.what, num_chars, max_chars, self.n_ctx, param=self.param
                )
            if len(text) > QUICK_CHARS:
                num_least += vocabulary.least_tokens(text, self.most)
            if num_least > self.most:
                raise ContextLengthError.over(
                    self.what, num_least, self.n_ctx, param=self.param, is_least=True
                )


def check_question(num_chars: int, num_tokens: int) -> None:
    """Raises InvalidRequestError where a text, or token ids, to be turned into the other are too many."""
    if num_chars > MAX_QUESTION_CHARS:
        raise InvalidRequestError(
            f"the text has {num_chars} characters, at most {MAX_QUESTION_CHARS} are tokenised at once",
            param="content",
        )
    if num_tokens > MAX_QUESTION_TOKENS:
        raise InvalidRequestError(
            f"{num_tokens} token ids were given, at most {MAX_QUESTION_TOKENS} are taken at once",
            param="tokens",
        )
