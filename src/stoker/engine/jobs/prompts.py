"""A prompt as tokens: how long its text may be, the tokens of text and of images, an encoder's source.

An image's tokens are numbers made of its content (SPEC C11). How few tokens a text may have is the
vocabulary's to say, as is which token an answer begins with.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.backends.protocol.backend import PicturePart
from stoker.cache.radix import image_ids, key_of
from stoker.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest
from stoker.kv.sequence import ImageSpan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Vocabulary
    from stoker.backends.protocol.vision import Layout, Vision
    from stoker.ipc.request import Medium

QUICK_CHARS = 2**14
"""A shorter text is tokenised in some hundredths of a second: it is not looked at beforehand."""
USUAL_CHARS_PER_TOKEN = 8
"""Nor is a text that has no more characters for each token it may have: one that fits may be as long. The
first look reads the whole vocabulary, which takes longer than to tokenise such a text."""
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
        texts = list(texts)
        num_chars = sum(map(len, texts))
        max_chars = max(QUICK_CHARS, self.most * MAX_CHARS_PER_TOKEN)
        if num_chars > max_chars:
            raise ContextLengthError.over_chars(self.what, num_chars, max_chars, self.n_ctx, param=self.param)
        if num_chars <= max(QUICK_CHARS, self.most * USUAL_CHARS_PER_TOKEN):
            return
        num_least = 0
        for text in texts:
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


def text_tokens(text: str, vocabulary: Vocabulary, *, is_chat: bool, has_state: bool = False) -> list[int]:
    """Token ids of a prompt's text.

    A completion's text gets what the vocabulary adds. A chat template writes the special tokens itself, but
    not every template writes the BOS that its model was trained with; llama-server adds it, and so does this.

    Args:
        text: the prompt.
        vocabulary: of the model.
        is_chat: a chat template wrote it. It gets the BOS that the vocabulary adds to every text, unless it
            begins with that already, and no EOS.
        has_state: the model begins from a given state; a conversation goes on there, without a BOS.
    """
    tokens = vocabulary.tokenize(text, add_special=not is_chat, parse_special=True)
    bos = vocabulary.added_bos
    if is_chat and not has_state and bos is not None and tokens[:1] != [bos]:
        return [bos, *tokens]
    return tokens


def pictured_prompt(
    request: GenerateRequest, vocabulary: Vocabulary, vision: Vision
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Token ids of the prompt, negative ones at the images' places, and these places.

    Raises:
        InvalidRequestError: there are not as many markers as images, or what was asked for needs the
            prompt's own tokens.
    """
    if request.pictures:
        _check_pictured(request)
    texts = str(request.prompt).split(IMAGE_MARKER)
    num_given = len(request.pictures)
    if len(texts) - 1 != num_given:
        raise InvalidRequestError(
            f"the prompt has {len(texts) - 1} places for pictures and recordings ({IMAGE_MARKER}),"
            f" {num_given} were given",
            param="messages" if request.is_chat or num_given else "prompt",
        )
    tokens = text_tokens(texts[0], vocabulary, is_chat=request.is_chat)
    spans: list[ImageSpan] = []
    apart = [bytes.fromhex(vision.fingerprint), request.cache_salt.encode()]
    if not request.cache:
        apart.append(secrets.token_bytes(16))  # encoded anew, and shared with no request
    for picture, text in zip(request.pictures, texts[1:], strict=True):
        spans += _append_image(tokens, picture, vision.layout(picture), b"".join([*apart, picture.content]))
        tokens += vocabulary.tokenize(text, add_special=False, parse_special=True)
    return tokens, tuple(spans)


def _check_pictured(request: GenerateRequest) -> None:
    if not isinstance(request.prompt, str):
        raise InvalidRequestError(
            "pictures and recordings go with a prompt that is text, not token ids", param="prompt"
        )
    for name in ("echo", "context_shift", "prompt_logprobs", "state_output"):
        if getattr(request, name) not in {None, False}:
            raise UnsupportedError(
                f"{name} cannot be had of a prompt with pictures or recordings", param=name
            )


def _append_image(tokens: list[int], picture: Medium, layout: Layout, content: bytes) -> list[ImageSpan]:
    """Append an image to `tokens`; a tall one may come in several parts.

    `content` is what its numbers are made of: equal content shares what was computed of it.
    """
    spans, offset = [], 0
    num_tokens = sum(part.num_tokens for part in layout if isinstance(part, PicturePart))
    ids = image_ids(content, num_tokens)
    for part in layout:
        if isinstance(part, PicturePart):
            spans.append(ImageSpan(len(tokens), part, picture, key_of(ids), offset))
            tokens += ids[offset : offset + part.num_tokens]
            offset += part.num_tokens
        else:
            tokens += part
    return spans


# ---------------------------------------------------------------- what an encoder-decoder reads (SPEC K3)


def refuse_unreadable(request: GenerateRequest, model: str) -> None:
    """Raises UnsupportedError where a request asks for what only a prompt that is continued can give."""
    what = f"{model} is an encoder-decoder"
    if request.state_output is not None:
        raise UnsupportedError(
            f"{what}: what its encoder makes of a text is for its decoder to read,"
            " and no state, vector or score of the text",
            param="model",
        )
    if request.prompt_logprobs is not None:
        raise UnsupportedError(
            f"{what}: its prompt is read by the encoder, which gives no probabilities of its tokens",
            param="prompt_logprobs",
        )
    if request.context_shift:
        raise UnsupportedError(
            f"{what}: its answer begins with no prompt that a shifted context could keep",
            param="context_shift",
        )


def check_source(source: list[int], n_ctx: int) -> None:
    """Raises ContextLengthError where a source is longer than the encoder reads at once."""
    if len(source) > n_ctx:
        raise ContextLengthError.over("the prompt without its answer", len(source), n_ctx)
