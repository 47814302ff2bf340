"""A prompt with images as tokens: of its text, and numbers made of their content (SPEC C11)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from stoker.cache.radix import image_ids, key_of
from stoker.engine.jobs.sources import text_tokens
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import IMAGE_MARKER
from stoker.kv.sequence import ImageSpan

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Vocabulary
    from stoker.backends.protocol.vision import Layout, Vision
    from stoker.ipc.request import GenerateRequest, Picture


def pictured_prompt(
    request: GenerateRequest, vocabulary: Vocabulary, vision: Vision
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Token ids of the prompt, negative ones at the images' places, and these places.

    Raises:
        InvalidRequestError: there are not as many markers as images, or what was asked for needs the
            prompt's own tokens.
    """
    if request.pictures:
        _check(request)
    texts = str(request.prompt).split(IMAGE_MARKER)
    num_given = len(request.pictures)
    if len(texts) - 1 != num_given:
        raise InvalidRequestError(
            f"the prompt has {len(texts) - 1} places for pictures ({IMAGE_MARKER}), {num_given} were given",
            param="messages" if request.is_chat or num_given else "prompt",
        )
    tokens = text_tokens(texts[0], vocabulary, is_chat=request.is_chat)
    spans: list[ImageSpan] = []
    apart = [bytes.fromhex(vision.fingerprint), request.cache_salt.encode()]
    if not request.cache:
        apart.append(secrets.token_bytes(16))  # encoded anew, and shared with no request
    for picture, text in zip(request.pictures, texts[1:], strict=True):
        spans += _append(tokens, picture, vision.layout(picture), b"".join([*apart, picture.content]))
        tokens += vocabulary.tokenize(text, add_special=False, parse_special=True)
    return tokens, tuple(spans)


def _check(request: GenerateRequest) -> None:
    if not isinstance(request.prompt, str):
        raise InvalidRequestError("pictures go with a prompt that is text, not token ids", param="prompt")
    for name in ("echo", "context_shift", "prompt_logprobs", "state_output"):
        if getattr(request, name) not in {None, False}:
            raise UnsupportedError(f"{name} cannot be had of a prompt with pictures", param=name)


def _append(tokens: list[int], picture: Picture, layout: Layout, content: bytes) -> list[ImageSpan]:
    """Append an image to `tokens`; a tall one may come in several parts.

    `content` is what its numbers are made of: equal content shares what was computed of it.
    """
    spans, offset = [], 0
    num_tokens = sum(part for part in layout if isinstance(part, int))
    ids = image_ids(content, num_tokens)
    for part in layout:
        if isinstance(part, int):
            spans.append(ImageSpan(len(tokens), part, picture, key_of(ids), offset))
            tokens += ids[offset : offset + part]
            offset += part
        else:
            tokens += part
    return spans
