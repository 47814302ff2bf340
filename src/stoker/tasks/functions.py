"""Python functions as tools: what a model is told of one, and its call (SPEC D7).

Owns the way from signature and docstring to OpenAI's form of a tool, and from a call's arguments to a result
as text. Bounds on tools are `chat.tools`'.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import to_json

from stoker.errors import InvalidRequestError

__all__ = ["PythonTool", "ToolLike", "described"]

log = logging.getLogger(__name__)

ToolLike = Mapping[str, Any] | Callable[..., Any]
"""A function that a model may call: OpenAI's form of one, or a Python function."""

_MAX_RESULT_CHARS = 65_536


def described(tools: Any) -> Any:
    """The tools of a call with Python functions in OpenAI's form; what is none of a list is left as it is.

    Raises:
        InvalidRequestError: a function cannot be described.
    """
    if not isinstance(tools, list | tuple):
        return tools
    return [PythonTool(tool).described if callable(tool) else tool for tool in tools]


class PythonTool:
    """A function that a model may call, synchronous or not.

    Args:
        function: its name and docstring are told to the model, and its parameters by their annotations, as
            pydantic reads them (`Annotated[int, Field(description="...")]` too).

    Attributes:
        name: of the function.
        described: the tool in OpenAI's form.

    Raises:
        InvalidRequestError: the function has no name, or a parameter is of a type that JSON cannot hold.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        if not self.name.isidentifier():
            text = f"tools: {self.name} has no name that a model could call it by; write a function with def"
            raise InvalidRequestError(text, param="tools")

        @wraps(function, updated=())
        def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            # The call itself comes later: a ValidationError that the function raises is its own.
            return partial(function, *args, **kwargs)

        try:
            self._bound = TypeAdapter[Callable[[], Any]](cast("Any", bound))
            schema = self._bound.json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, TypeError, ValueError) as error:
            text = f"tools: the parameters of {self.name} cannot be described: {error}"
            raise InvalidRequestError(text[:400], param="tools") from None
        about = {"name": self.name, "description": inspect.getdoc(function) or "", "parameters": schema}
        self.described: dict[str, Any] = {"type": "function", "function": about}
        self._is_async = inspect.iscoroutinefunction(function)

    def __repr__(self) -> str:
        return f"PythonTool({self.name})"

    async def result(self, arguments: str) -> str:
        """What a call with these arguments (JSON) gives, as text for the model; an error is a text as well.

        A function that is not asynchronous runs in a thread. A text is the result as it is, anything else
        as JSON.
        """
        call = None
        try:
            call = self._bound.validate_json(arguments)
            value = call() if self._is_async else await asyncio.to_thread(call)
            if inspect.isawaitable(value):  # of a decorated one too
                value = await value
            text = value if isinstance(value, str) else to_json(value, fallback=str).decode()
        except Exception as error:  # noqa: BLE001 - whatever a stranger's function raises is its result
            if call is None and isinstance(error, ValidationError):
                text = f"error: {_problems(error)}"
            else:
                log.info("the tool %s raised %r; the model is told", self.name, error)
                text = f"error: {type(error).__name__}: {error}"
        if len(text) > _MAX_RESULT_CHARS:
            text = f"{text[:_MAX_RESULT_CHARS]} ... (cut, it has {len(text)} characters)"
        return text


def _problems(error: ValidationError) -> str:
    """What is wrong with the arguments of a call, in a line."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in found)
