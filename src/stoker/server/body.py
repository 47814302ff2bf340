"""Request bodies: bytes to a validated pydantic model in one pass, and what OpenAPI says of them.

Any content type is read as JSON (`curl -d` declares a form); pages of other origins are kept out by `gate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import models_json_schema

from stoker.server.errors import invalid_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

_REFERENCE = "#/components/schemas/{model}"


class Body(BaseModel):
    """Base of all request bodies: exact JSON types, finite numbers, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B]) -> B:
    """Read and validate the body.

    Raises:
        InvalidRequestError: not JSON, not UTF-8, nested too deeply, or a field is wrong; `param` names it.
        RequestTooLargeError: over the limit (raised by the gate while reading).
    """
    # Starlette's own `body` would keep the bytes, of pictures too, for as long as the answer takes.
    data = b"".join([part async for part in request.stream()])
    try:
        return model.model_validate_json(data or b"{}")
    except ValidationError as error:
        raise invalid_body(error) from None


def described(model: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model`."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def body_schemas(models: Sequence[type[Body]]) -> dict[str, Any]:
    """The schemas that `described` refers to, by name."""
    _, document = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    schemas: dict[str, Any] = document["$defs"]
    return schemas
