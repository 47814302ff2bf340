"""Images and recordings in the turns of a conversation: which there are, and where each stands (SPEC V2, V9).

Owns the marker that one becomes in a turn's text, which roles may show them, and that there are as many
markers as of them. `intake` fetches and decodes them, the template makes the prompt. Of places, markers and
roles what is said of an image holds for a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stoker.audio.audio import Audio
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.images.image import Image, images_of
from stoker.ipc.model import ModelInfo, Pairing
from stoker.ipc.request import IMAGE_MARKER

_MAY_SHOW = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that a conversation holds: an application's Audio, or a stranger's base64.

    `rate_hz` is at how many samples a second its model hears.
    """

    source: Audio | str
    rate_hz: int


@dataclass(frozen=True, slots=True)
class Given:
    """An image or a recording that a conversation holds.

    Attributes:
        source: an application's Image, a stranger's URI, or a recording.
        param: path of it in the request, for errors.
    """

    source: Image | str | Recording
    param: str


_TEXT_ONLY = "of its folder only text is computed: serve its GGUF file with --mmproj FILE"


def can_see(info: ModelInfo) -> bool:
    """Whether the model reads images as it is served."""
    return info.has_vision or (info.pairing == Pairing.READY and not can_hear(info))


def can_hear(info: ModelInfo) -> bool:
    """Whether the model takes recordings as it is served."""
    return info.hears_hz > 0


def require_vision(info: ModelInfo, param: str) -> None:
    """Raises UnsupportedError where the model reads no images, saying what it lacks."""
    if can_see(info):
        return
    why = {
        Pairing.NEEDS_PROJECTOR: "it lacks its projector: serve it with --mmproj FILE",
        Pairing.BROKEN: "its projector does not fit it",
        Pairing.READY: "its projector hears and sees nothing",
        Pairing.TEXT_ONLY: _TEXT_ONLY,
    }.get(Pairing(info.pairing), f"it has no vision ({_without(info)})")
    why = info.pairing_reason or why
    raise UnsupportedError(f"{param}: the model {info.id} takes text, no pictures: {why}", param=param)


def require_hearing(info: ModelInfo, param: str) -> None:
    """Raises UnsupportedError where the model takes no recordings, saying what it lacks."""
    if can_hear(info):
        return
    why = {
        Pairing.NEEDS_PROJECTOR: "it lacks its projector: serve it with --mmproj FILE",
        Pairing.BROKEN: "its projector does not fit it",
        Pairing.READY: "its projector sees and hears nothing",
        Pairing.TEXT_ONLY: _TEXT_ONLY,
    }.get(Pairing(info.pairing), f"it has no hearing ({_without(info)})")
    raise UnsupportedError(f"{param}: the model {info.id} takes no recordings: {why}", param=param)


def _without(info: ModelInfo) -> str:
    """What a model without a projector is; of a GGUF file, which may be given one, that it has none."""
    given = ", and no projector is given" if info.path.lower().endswith(".gguf") else ""
    return f"{info.architecture}{given}"


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
        UnsupportedError: the model reads no images, or takes no recordings.
        InvalidRequestError: a part is malformed, an image or a marker is in a turn that may have none, or
            there are more markers than images.
    """
    has_media = can_see(info) or can_hear(info)
    if not has_media and not any(isinstance(turn.get("content"), list | tuple) for turn in messages):
        return [dict(turn) for turn in messages], ()
    turns = [_Turn.of(f"messages.{index}", message, info) for index, message in enumerate(messages)]
    images = tuple(image for turn in turns for image in turn.images)
    if images or has_media:
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
            raise InvalidRequestError(f"{strange} is neither text, a picture nor a recording", param=strange)
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
            text = f"{where}: pictures and recordings stand in user turns, not in {role}'s"
            raise InvalidRequestError(text, param=where)
        if num_written > num_images:
            where = f"{self.where}.content"
            text = f"{where}: {num_written} markers {IMAGE_MARKER} for {num_images} pictures and recordings"
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
    """A text, an image, a recording, or None: something the template may know."""
    if isinstance(part, str):
        return part
    if isinstance(part, Image | Audio):
        return _own(part, where, info)
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} is no part of a message", param=where)
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind in _READERS:
        return _READERS[kind](part, where, info)
    return None


def _own(medium: Image | Audio, where: str, info: ModelInfo) -> Given:
    """An application's image or recording. Raises UnsupportedError where the model takes none."""
    if isinstance(medium, Image):
        require_vision(info, where)
        return Given(medium, where)
    require_hearing(info, where)
    return Given(Recording(medium, info.hears_hz), where)


def _linked_image(part: Mapping[str, Any], where: str, info: ModelInfo) -> Given:
    """A stranger's image. Raises UnsupportedError: the model takes none; InvalidRequestError: no URL."""
    require_vision(info, where)
    link = part.get("image_url")
    url = link.get("url") if isinstance(link, Mapping) else link
    if not isinstance(url, str):
        raise InvalidRequestError(f"{where}.image_url has no url", param=f"{where}.image_url")
    return Given(url, f"{where}.image_url")


def _input_audio(part: Mapping[str, Any], where: str, info: ModelInfo) -> Given:
    """A stranger's recording. Raises UnsupportedError: the model takes none; InvalidRequestError: no data."""
    require_hearing(info, where)
    given = part.get("input_audio")
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(data, str):
        raise InvalidRequestError(f"{where}.input_audio has no data", param=f"{where}.input_audio")
    return Given(Recording(data, info.hears_hz), f"{where}.input_audio")


def _own_image(part: Mapping[str, Any], where: str, info: ModelInfo) -> Given | None:
    given = part.get("image")
    if given is None:
        return None
    return _own(given if isinstance(given, Image) else Image(given), where, info)


def _own_audio(part: Mapping[str, Any], where: str, info: ModelInfo) -> Given | None:
    given = part.get("audio")
    if given is None:
        return None
    return _own(given if isinstance(given, Audio) else Audio(given), where, info)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, ModelInfo], Given | None]] = {
    "image_url": _linked_image,
    "input_image": _linked_image,
    "input_audio": _input_audio,
    "image": _own_image,
    "audio": _own_audio,
}
"""What reads a part, by its type."""
