"""Images in the turns of a conversation: which there are, and where each stands in the text (SPEC V2).

Owns the marker that an image becomes in a turn's text, which roles may show images, and that there are as
many markers as images. `intake` fetches and decodes them, the template makes the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.images.image import Image, images_of
from stoker.ipc.model import ModelInfo, Pairing
from stoker.ipc.request import IMAGE_MARKER

_LINKED = frozenset({"image_url", "input_image"})
_MAY_SHOW = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True)
class Given:
    """An image that a conversation holds.

    Attributes:
        source: an application's Image, or a stranger's URI.
        param: path of it in the request, for errors.
    """

    source: Image | str
    param: str


def can_see(info: ModelInfo) -> bool:
    """Whether the model reads images as it is served."""
    return info.has_vision or info.pairing == Pairing.READY


def require_vision(info: ModelInfo, param: str) -> None:
    """Raises UnsupportedError where the model reads no images, saying what it lacks."""
    if can_see(info):
        return
    why = {
        Pairing.NEEDS_PROJECTOR: "it lacks its projector: serve it with --mmproj FILE",
        Pairing.BROKEN: "its projector does not fit it",
    }.get(Pairing(info.pairing), f"it has no vision ({info.architecture}, and no projector is given)")
    raise UnsupportedError(f"{param}: the model {info.id} takes text, no pictures: {why}", param=param)


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Any | Sequence[Any]
) -> Sequence[Mapping[str, Any]]:
    """The conversation with further images at the front of its last user turn.

    `images` is whatever `Image` takes, or a list of such.

    Raises:
        InvalidRequestError: it has no such turn.
    """
    given = images_of(images)
    if not given:
        return messages
    at = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if at is None:
        raise InvalidRequestError("there is no user turn for the pictures", param="messages")
    content = messages[at].get("content") or ""
    parts = [*given, *([content] if isinstance(content, str) else content)]
    return [*messages[:at], {**messages[at], "content": parts}, *messages[at + 1 :]]


def illustrated(
    messages: Sequence[Mapping[str, Any]], info: ModelInfo
) -> tuple[list[dict[str, Any]], tuple[Given, ...]]:
    """The conversation with its images taken out: turns whose contents are text, and the images.

    An image's marker stands where its part stands. Markers that the user wrote are used instead, in their
    order; images they do not reach stand at the front of their turn.

    Args:
        messages: turns whose content is text or a list of parts: OpenAI's, texts, or Images.
        info: of the model that is to see them.

    Raises:
        UnsupportedError: the model reads no images.
        InvalidRequestError: a part is malformed, an image or a marker is in a turn that may have none, or
            there are more markers than images.
    """
    if not can_see(info) and not any(isinstance(turn.get("content"), list | tuple) for turn in messages):
        return [dict(turn) for turn in messages], ()
    turns = [_Turn.of(f"messages.{index}", message, info) for index, message in enumerate(messages)]
    images = tuple(image for turn in turns for image in turn.images)
    if images or can_see(info):
        for turn in turns:
            turn.check()
    return [turn.message() for turn in turns], images


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn on its way; `pieces` are texts and images in order, None: its content stays as it is."""

    where: str
    given: Mapping[str, Any]
    pieces: list[str | Given] | None

    @classmethod
    def of(cls, where: str, message: Mapping[str, Any], info: ModelInfo) -> _Turn:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return cls(where, message, None)
        pieces = [_piece(part, f"{where}.content.{index}", info) for index, part in enumerate(content)]
        known = [piece for piece in pieces if piece is not None]
        if len(known) == len(pieces):
            return cls(where, message, known)
        if any(isinstance(piece, Given) for piece in known):
            strange = f"{where}.content.{pieces.index(None)}"
            raise InvalidRequestError(f"{strange} is neither text nor a picture", param=strange)
        return cls(where, message, None)

    @property
    def images(self) -> list[Given]:
        return [piece for piece in self.pieces or () if isinstance(piece, Given)]

    @property
    def _num_written(self) -> int:
        content = self.given.get("content")
        texts = self.pieces if self.pieces is not None else [content]
        return sum(text.count(IMAGE_MARKER) for text in texts if isinstance(text, str))

    def check(self) -> None:
        """Raises InvalidRequestError for a wrong role, or more markers than images."""
        role, num_images, num_written = self.given.get("role"), len(self.images), self._num_written
        if role not in _MAY_SHOW and (num_images or num_written):
            where = self.images[0].param if num_images else f"{self.where}.content"
            raise InvalidRequestError(f"{where}: pictures stand in user turns, not in {role}'s", param=where)
        if num_written > num_images:
            where = f"{self.where}.content"
            text = f"{where}: {num_written} markers {IMAGE_MARKER} for {num_images} pictures"
            raise InvalidRequestError(text, param=where)

    def message(self) -> dict[str, Any]:
        """The turn as the template gets it."""
        if self.pieces is None:
            return dict(self.given)
        num_written = self._num_written
        stand_in = "" if num_written else IMAGE_MARKER
        text = "".join(
            "\n".join(map(str, run)) if is_text else stand_in * len(list(run))  # as `text_of` joins
            for is_text, run in groupby(self.pieces, lambda piece: isinstance(piece, str))
        )
        missing = len(self.images) - num_written if num_written else 0
        return {**self.given, "content": IMAGE_MARKER * missing + text}


def _piece(part: Any, where: str, info: ModelInfo) -> str | Given | None:
    """A text, an image, or None: something the template may know."""
    if isinstance(part, str):
        return part
    if isinstance(part, Image):
        require_vision(info, where)
        return Given(part, where)
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} is no part of a message", param=where)
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind in _LINKED:
        require_vision(info, where)
        link = part.get("image_url")
        url = link.get("url") if isinstance(link, Mapping) else link
        if not isinstance(url, str):
            raise InvalidRequestError(f"{where}.image_url has no url", param=f"{where}.image_url")
        return Given(url, f"{where}.image_url")
    if kind == "image" and "image" in part:
        require_vision(info, where)
        return Given(part["image"] if isinstance(part["image"], Image) else Image(part["image"]), where)
    return None
