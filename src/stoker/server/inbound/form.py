"""Request bodies that are forms (multipart/form-data): one file and some fields.

The bytes are received as those of any body (`bodies`), and nothing of them is written to a disk. What fields
may say is a `Body` model's, as of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from stoker.errors import InvalidRequestError, RequestTooLargeError
from stoker.server.inbound.body import Body, Described, taken_document

if TYPE_CHECKING:
    from starlette.requests import Request

    from stoker.server.inbound.bodies import IncomingBodies

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 * 1024
"""Of one field that is no file."""
_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 4096
_SLICE_BYTES = 2**20

B = TypeVar("B", bound=Body)


class DescribedForm(Described):
    """`openapi_extra` of a route that reads a form: the fields of `model`, and a file."""

    def __init__(self, model: type[Body], file: str) -> None:
        super().__init__(model)
        (fields,) = self["requestBody"]["content"].values()
        binary = {"type": "string", "format": "binary"}
        form = {"type": "object", "properties": {file: binary}, "required": [file]}
        content = {"multipart/form-data": {"schema": {"allOf": [fields["schema"], form]}}}
        self["requestBody"] = {"required": True, "content": content}


@dataclass(slots=True)
class _FormPart:
    """One part on its way."""

    name: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)


async def read_form(request: Request, model: type[B], file: str) -> tuple[B, bytes]:
    """Read a form: its fields, validated, and the bytes of its one file.

    Args:
        request: the HTTP request.
        model: of the fields. What a field's text stands for is told by its validators; a field whose name
            ends in [] is a list.
        file: name of the file's field.

    Raises:
        InvalidRequestError: it is no form, is broken, has no such file, or a field is wrong.
        RequestTooLargeError: it has too many bytes, parts, or bytes in a field.
        RequestTimeoutError, ServerBusyError: see `IncomingBodies.received`.
        KeyForbidsError: the key that it came with may not ask for its class or use its model.
    """
    bodies: IncomingBodies = request.state.bodies
    boundary = _boundary(request)
    model.model_rebuild()
    async with bodies.received(request.receive) as data:
        document, content = await bodies.decoded(data, partial(_parsed, boundary, file))
    request.state.has_large_body = False  # the fields are small, whatever the file is
    return taken_document(request, model, document), content


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        told = request.headers.get("content-type", "nothing")[:80]
        raise InvalidRequestError(
            f"the body has to be a form (multipart/form-data), it is declared as {told!r}"
        )
    return options[b"boundary"]


def _parsed(boundary: bytes, file: str, data: bytearray) -> tuple[dict[str, Any], bytes]:
    """The fields by their names, and the file; `data` is emptied."""
    parts = _FormParts(file)
    try:
        parser = MultipartParser(
            boundary,
            parts.callbacks(),
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
        for start in range(0, len(data), _SLICE_BYTES):
            parser.write(bytes(data[start : start + _SLICE_BYTES]))
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"the form is broken: {str(error)[:120]}") from None
    data.clear()
    return parts.fields(), parts.content()


class _FormParts:
    """Takes the parser's calls, and bounds what they bring.

    Args:
        file: name of the field that is the file.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._parts: list[_FormPart] = []
        self._header = bytearray()
        self._value = bytearray()
        self._is_whole = False

    def callbacks(self) -> Any:
        """By the parser's names."""
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_end": self._on_end,
        }

    def fields(self) -> dict[str, Any]:
        """Texts by name; lists of texts by names that end in [].

        Raises:
            InvalidRequestError: a field is no UTF-8, comes twice, or the form has no end.
        """
        if not self._is_whole:
            raise InvalidRequestError("the form is broken: it ends too early")
        found: dict[str, Any] = {}
        for part in self._parts:
            if part.is_file:
                continue
            try:
                text = part.data.decode()
            except UnicodeDecodeError:
                raise InvalidRequestError(f"{part.name} is not UTF-8", param=part.name) from None
            if part.name.endswith("[]"):
                found.setdefault(part.name.removesuffix("[]"), []).append(text)
            elif part.name in found:
                raise InvalidRequestError(f"{part.name} is given twice", param=part.name)
            else:
                found[part.name] = text
        return found

    def content(self) -> bytes:
        """The file. Raises InvalidRequestError where there is none, or several."""
        files = [part for part in self._parts if part.is_file]
        if len(files) != 1:
            text = f"{self._file}: the form has {len(files)} files, one is taken"
            raise InvalidRequestError(text, param=self._file)
        return bytes(files[0].data)

    def _on_part_begin(self) -> None:
        if len(self._parts) == MAX_PARTS:
            raise RequestTooLargeError(f"the form has over {MAX_PARTS} parts", bound=MAX_PARTS)
        self._parts.append(_FormPart())

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            part = self._parts[-1]
            part.name = options.get(b"name", b"").decode(errors="replace")
            part.is_file = part.name == self._file
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        if not self._parts[-1].name:
            raise InvalidRequestError("the form is broken: a part has no name")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1]
        part.data += data[start:end]
        if not part.is_file and len(part.data) > MAX_FIELD_BYTES:
            text = f"{part.name[:40]}: a field has over {MAX_FIELD_BYTES} bytes"
            raise RequestTooLargeError(text, bound=MAX_FIELD_BYTES)

    def _on_end(self) -> None:
        self._is_whole = True
