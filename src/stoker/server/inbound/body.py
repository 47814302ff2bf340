"""Request bodies: bytes to a validated pydantic model, and what OpenAPI says of them.

Any content type is read as JSON (`curl -d` declares a form); pages of other origins are kept out by `gate`.
What decoding may cost is bounded before (`bodies`); how much validation may cost is bounded here, by a
length for every list and object, and by ending at the first error.

Fields that a route does not know are ignored, as other servers do and clients rely on; a header of the answer
names them, and the log does so once. Objects of the body itself are looked into; lists are not, as turns come
back from clients with what other vendors put there.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

import msgspec
from fastapi.routing import APIRoute
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError

from stoker.errors import InvalidRequestError
from stoker.ipc.model import ModelInfo
from stoker.remote.wire import REQUEST_ID
from stoker.server.errors import invalid_body
from stoker.server.inbound.bodies import LARGE_BYTES, MAX_VALUES, JsonBounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from stoker.server.inbound.bodies import IncomingBodies
    from stoker.server.inbound.named_keys import Permit

log = logging.getLogger(__name__)

_REFERENCE = "#/components/schemas/{model}"

MAX_ITEMS = 8192
"""Of any list but one of token ids: turns, parts, tools, texts; some have a smaller bound of their own."""
MAX_KEYS = 4096
"""Of an object with names of the caller's own."""
MAX_UNKNOWN = 32
"""Fields that a route does not know and that the answer may name; the first ones."""
MAX_NAME_CHARS = 1024
"""Of a model's name, which may be a path."""
MAX_TOKEN_IDS = 300_000
"""Of one list; OpenAI takes as many in one request of embeddings, and contexts of 262,144 tokens fit."""
VALUES_WITH_TOKENS = MAX_TOKEN_IDS + MAX_VALUES
"""Of a body that may hold token ids."""
MAX_TOLD = 256
"""Names that the log tells of in all: a stranger may make up any number."""
_MAX_NAMED = 8
_MAX_NAME_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")

_ESCAPED_BACKSLASH_OR_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)

T = TypeVar("T")


def _check_keys(value: Any) -> Any:
    """Refuse an object with too many keys before any of its values is validated."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise PydanticCustomError("too_long", "Object should have at most {most} keys", {"most": MAX_KEYS})
    return value


Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID}$")]
Many = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Named = Annotated[dict[str, T], Field(max_length=MAX_KEYS), BeforeValidator(_check_keys)]


class Body(BaseModel):
    """Base of all request bodies: exact JSON types, finite numbers, unknown fields ignored.

    Attributes:
        max_values: JSON values that the body may hold in all, those that are ignored included.
    """

    # deferred: most servers use few of the bodies, and validators of all take memory and time at the start
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, defer_build=True)

    max_values: ClassVar[int] = MAX_VALUES

    @property
    def own_id(self) -> str | None:
        """What its request is to be known by besides; None: what its header says."""
        return None

    @property
    def own_class(self) -> str | None:
        """The class that it asks for; None: it does not say."""
        return None

    @property
    def own_models(self) -> list[str | None]:
        """Names of the models that it is for; None is the default one."""
        return [self.__dict__["model"]] if "model" in self.__dict__ else []


FindModel = Callable[[str | None], ModelInfo]
B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B]) -> B:
    """Read and validate the body; a large one in a thread, as a step of it is not to hold the event loop.

    Raises:
        InvalidRequestError: not JSON, not UTF-8, nested too deeply, or a field is wrong; `param` names it.
        RequestTooLargeError: it has too many bytes or too much in it.
        RequestTimeoutError, ServerBusyError: see `IncomingBodies.received`.
        KeyForbidsError: the key that it came with may not ask for its class or use its model.
    """
    bodies: IncomingBodies = request.state.bodies
    model.model_rebuild()  # the first time; in one thread, as decoding is in two
    async with bodies.received(request.receive, JsonBounds(model.max_values)) as data:
        return await taken_body(request, model, data)


async def taken_body(request: Request, model: type[B], data: bytearray) -> B:
    """The body of bytes that were received and bounded. Raises InvalidRequestError as `read_body`."""
    bodies: IncomingBodies = request.state.bodies
    request.state.has_large_body = len(data) > LARGE_BYTES
    body, unknown = await bodies.decoded(data, partial(_validated, model))
    return _taken(request, body, unknown)


def taken_document(request: Request, model: type[B], document: dict[str, Any]) -> B:
    """The body that small fields are, such as a form's. Raises InvalidRequestError as `read_body`."""
    body = validated(model, document)
    return _taken(request, body, list(islice(unknown_names(model, document), MAX_UNKNOWN)))


def _taken(request: Request, body: B, unknown: list[str]) -> B:
    """Have the request known by what the body says, and refuse what its key may not ask for."""
    if body.own_id is not None:
        request.state.request_id = body.own_id
    if unknown:
        request.state.unknown_fields.tell(request, unknown, known_names(type(body)))
    _check_permit(request, body)
    return body


def _check_permit(request: Request, body: Body) -> None:
    """Refuse what the key of the request may not ask for."""
    permit: Permit = request.state.identity.permit
    permit.check_class(body.own_class)
    if permit.models:
        for name in body.own_models:
            permit.check_model(request.state.find_model(name))


async def beside(request: Request, work: Callable[[], T]) -> T:
    """What `work` makes of the body that was read of `request`: in a thread where the body is large.

    Of a small one it takes less time than a thread to begin.
    """
    return await asyncio.to_thread(work) if request.state.has_large_body else work()


def _validated(model: type[B], data: bytearray) -> tuple[B, list[str]]:
    """The body, and names of fields that it does not know."""
    try:
        document = msgspec.json.decode(data) if data else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_fault(data) or error}") from None
    data.clear()  # an image is megabytes, and the document has them now
    body = validated(model, document)
    return body, list(islice(unknown_names(model, document), MAX_UNKNOWN))


def _fault(data: bytearray) -> str:
    """What makes text no JSON, and where, if the decoder tells that wrongly; empty: it tells it."""
    try:
        data.decode()
    except UnicodeDecodeError as error:  # the decoder counts from the beginning of a string
        return f"byte 0x{data[error.start]:02x} is no UTF-8 (byte {error.start})"
    for found in _ESCAPED_BACKSLASH_OR_SURROGATE.finditer(data):  # which it takes for an end of the text
        if found["lone"]:
            return f"{found['lone'].decode()} is half of a surrogate pair (byte {found.start()})"
    return ""


def validated(model: type[B], document: Any) -> B:
    """The body that a document is. Raises InvalidRequestError for the first field that is wrong."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise invalid_body(error) from None


class UnknownFields:
    """What one server does about unknown fields, and has told of them.

    Args:
        is_strict: a request with one is refused.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._told: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"UnknownFields({len(self._told)} told)"

    def tell(self, request: Request, names: Iterable[str], known: Iterable[str]) -> None:
        """Have the answer to `request` name these fields, and the log those that it has not named yet.

        Raises:
            InvalidRequestError: unknown fields are refused; `param` names the first.
        """
        shown = [_UNSAFE.sub("?", name[:_MAX_NAME_CHARS]) for name in names]
        if self._is_strict:
            alike = difflib.get_close_matches(shown[0].rpartition(".")[2], known, 1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            text = f"unknown fields, which this server refuses (--strict): {ignored_names(shown)}{hint}"
            raise InvalidRequestError(text, param=shown[0])
        request.state.ignored = [*getattr(request.state, "ignored", ()), *shown]
        path = request.scope["route"].path
        for name in shown:
            if len(self._told) < MAX_TOLD and (path, name) not in self._told:
                self._told.add((path, name))
                alike = difflib.get_close_matches(name, known, 1)
                hint = f"; did a client mean {alike[0]!r}?" if alike else ""
                log.warning("%s ignores the unknown field %r%s", path, name, hint)


def ignored_names(names: list[str]) -> str:
    """The value of the header; a few of them where there are many."""
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])


def unknown_names(model: type[BaseModel], document: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Paths of what `document` holds and `model` does not know."""
    known = known_names(model)
    for name, value in document.items():
        if name not in known:
            yield within + name
        elif (inner := known[name]) is not None and isinstance(value, dict):
            yield from unknown_names(inner, value, f"{within}{name}.")


@cache
def known_names(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The names that a body may use, each with the model of the object that stands there, if one does."""
    found: dict[str, type[BaseModel] | None] = {}
    for name, field in model.model_fields.items():
        aliases = field.validation_alias
        names = aliases.choices if isinstance(aliases, AliasChoices) else [aliases or field.alias or name]
        inner = _model_in(field.annotation)
        found |= {str(one): inner for one in names}
    return found


def _model_in(kind: Any) -> type[BaseModel] | None:
    """The one model that a value of that type may be; None: it may be some other object, or none."""
    kinds = get_args(kind) or (kind,)
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


class Described(dict[str, Any]):
    """`openapi_extra` of a route that reads `model`."""

    def __init__(self, model: type[Body]) -> None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
        super().__init__(requestBody={"required": True, "content": content})
        self.model = model


def described_bodies(routes: Iterable[BaseRoute]) -> list[type[Body]]:
    """What `routes` read, each once."""
    extras = [route.openapi_extra for route in routes if isinstance(route, APIRoute)]
    return list(dict.fromkeys(extra.model for extra in extras if isinstance(extra, Described)))


def body_schemas(models: Sequence[type[Body]]) -> dict[str, Any]:
    """The schemas that `Described` refers to, by name."""
    _, document = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    schemas: dict[str, Any] = document["$defs"]
    return schemas
