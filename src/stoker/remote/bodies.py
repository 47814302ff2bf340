"""From the library's arguments to bodies of HTTP: requests, conversations with images, calls of several.

Owns the names that HTTP has for them, and the errors for what HTTP does not carry.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from stoker.audio.audio import Audio
from stoker.chat.conversation import ToolOffer
from stoker.documents.document import Document
from stoker.errors import InvalidRequestError, RequestNotFoundError, StateNotFoundError, UnsupportedError
from stoker.images.image import Image
from stoker.ipc.request import GenerateRequest
from stoker.models.states.file import MAX_STATE_BYTES
from stoker.remote.wire import REQUEST_ID, REQUESTS, STATES
from stoker.tasks.fields import GivenState, request_of, warn_former

T = TypeVar("T", Image, Audio, Document)

_DEFAULTS = msgspec.to_builtins(GenerateRequest(prompt=""))
_NOT_CARRIED = {
    "owner": "the server knows callers by their API keys",
    "route": "it is the server's own",
    "names": "a request has the name that request_id gives it",
    "state_output": "embed, choose, rerank and states deliver what it asks for",
}
_CALL_NAMES = {"keep_alive_s": "keep_alive"}
_CALL_FIELDS = frozenset(
    {"model", "timeout_s", "cache_salt", "cache", "priority", "keep_alive", "keep_alive_s"}
)


def refuse(given: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for the first of these arguments that is set: no server takes it."""
    for name, value in given.items():
        if value:
            why = _NOT_CARRIED.get(name, "only a runtime of this process has it")
            raise UnsupportedError(f"{name} does not travel to a server: {why}", param=name)


def request_body(
    request: GenerateRequest,
    conversation: Mapping[str, Any] | None = None,
    sampling: Collection[str] | None = None,
) -> dict[str, Any]:
    """The body that asks for a request, without what is as by default.

    Args:
        request: what is asked for.
        conversation: what its prompt is made of; None: it has one.
        sampling: names of the sampling fields that the caller gave, as the model's own defaults hold for the
            others; None: all of them.

    Raises:
        UnsupportedError: it asks for a state to be delivered.
    """
    refuse({"state_output": request.state_output})
    given = msgspec.to_builtins(request, str_keys=True)
    prompt, state = given.pop("prompt"), given.pop("initial_state")
    drawn = given.pop("sampling")
    body: dict[str, Any] = {
        "request": {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    }
    if named := {name: value for name, value in drawn.items() if sampling is None or name in sampling}:
        body["request"]["sampling"] = named
    body |= {"state": {"data": state}} if state else {}
    return body | ({"prompt": prompt} if conversation is None else {"conversation": conversation})


def state_fields(state: GivenState | None) -> dict[str, Any]:
    """The fields of a request's body that say what a recurrent model begins from.

    Raises:
        InvalidRequestError: the file cannot be read, or is too large.
    """
    match state:
        case None:
            return {}
        case str():
            return {"state": state}
        case Path():
            return {"state": {"data": _bytes_of(state)}}
    return {"state": {"data": bytes(state)}}


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_STATE_BYTES + 1)
    except OSError as error:
        text = f"cannot read the state file {path}: {error.strerror}"
        raise InvalidRequestError(text, param="state") from None


def messages_body(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their images and documents as `data:` URIs and their recordings in base64.

    Raises:
        InvalidRequestError: a message is none, or an image, a recording or a document cannot be read.
    """
    return [_turn(message, f"messages.{index}") for index, message in enumerate(messages)]


def _turn(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is no message with a role and content", param=where)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_part(part, f"{where}.content.{index}") for index, part in enumerate(content)]
    return {**message, "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    match part:
        case str():
            return {"type": "text", "text": part}
        case Image() | {"type": "image", "image": _}:
            return image_part(_medium(part, Image))
        case Audio() | {"type": "audio", "audio": _}:
            return audio_part(_medium(part, Audio))
        case Document() | {"type": "document", "document": _}:
            return _medium(part, Document).file_part()
        case Mapping():
            return dict(part)
    raise InvalidRequestError(f"{where} is no part of a message", param=where)


def _medium(part: Any, kind: type[T]) -> T:
    """An image, a recording or a document, given as itself or as what it is made of."""
    source = part[part["type"]] if isinstance(part, Mapping) else part
    return source if isinstance(source, kind) else kind(source)


def image_part(image: Image) -> dict[str, Any]:
    """The part of a message that shows it. Raises InvalidRequestError where it cannot be read."""
    return {"type": "image_url", "image_url": {"url": image.data_uri()}}


def audio_part(recording: Audio) -> dict[str, Any]:
    """The part of a message that lets hear it. Raises as `Audio.input_audio`."""
    return {"type": "input_audio", "input_audio": recording.input_audio()}


def call_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call without a text, by the names that its route has for them.

    Raises:
        InvalidRequestError: a name is unknown, a type wrong or a value out of range.
        UnsupportedError: the route has no place for a field.
    """
    warn_former(fields)
    given = {name: value for name, value in fields.items() if value is not None}
    refuse({name: given.pop(name) for name in ("owner", "names", "route") if name in given})
    given.pop("request_id", None)
    request_of("", given)  # the errors of the library
    if strange := sorted(given.keys() - _CALL_FIELDS):
        text = f"{strange[0]} does not travel with such a call: it generates nothing"
        raise UnsupportedError(text, param=strange[0])
    return {_CALL_NAMES.get(name, name): value for name, value in given.items()}


def taken(fields: Any, *names: str) -> dict[str, Any]:
    """The keyword arguments of these names, taken out of `fields`; those that are None are not among them."""
    found = {name: fields.pop(name) for name in names if name in fields}
    return {name: value for name, value in found.items() if value is not None}


def request_headers(fields: Mapping[str, Any]) -> dict[str, str]:
    """The header that gives a call the id that `fields` have for it; raises as `id_field` does."""
    given = id_field(fields.get("request_id"))
    return {"X-Request-Id": given["request_id"]} if given else {}


def id_field(request_id: str | None) -> dict[str, str]:
    """The field of a body that gives a request its id; none for None.

    Raises:
        InvalidRequestError: it has other characters than those that a header takes.
    """
    if request_id is None:
        return {}
    if not re.fullmatch(REQUEST_ID, request_id):
        text = f"request_id is {request_id[:40]!r}; at a server it has 1 to 128 letters, digits and . _ : -"
        raise InvalidRequestError(text, param="request_id")
    return {"request_id": request_id}


def request_path(request_id: str) -> str:
    """Where the request is. Raises RequestNotFoundError for what is no id of any."""
    if (part := _path_part(request_id)) is None:
        raise RequestNotFoundError(f"no live request has the id {request_id!r}", param="id")
    return f"{REQUESTS}/{part}"


def state_path(state_id: str) -> str:
    """Where the saved state is. Raises StateNotFoundError for what is no id of any."""
    if (part := _path_part(state_id)) is None:
        raise StateNotFoundError(f"there is no state {state_id!r}", param="state_id")
    return f"{STATES}/{part}"


def _path_part(own_id: str) -> str | None:
    """The id as a part of a path; None: it would lead elsewhere."""
    return None if "/" in own_id or set(own_id) <= {"."} else quote(own_id, safe="")


def offer_body(offer: ToolOffer) -> dict[str, Any]:
    """An offer of tools as the fields of a conversation's body."""
    style = {"tool_format": offer.tool_format} if offer.tool_format else {}
    if not offer.tools:
        return style
    choice: Any = offer.choice.mode
    if offer.choice.name:
        choice = _function_named(offer.choice.name)
    elif offer.choice.allowed:
        allowed = {"mode": choice, "tools": [_function_named(name) for name in offer.choice.allowed]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    tools = [one.to_template() for one in offer.tools]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": offer.max_calls > 1} | style


def _function_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
