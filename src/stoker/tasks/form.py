"""The form that an answer has to have: what it is held to while it is written, and how it is read (SPEC D2).

Owns the keyword arguments that ask for one, which are the fields of HTTP, and `AnswerSchema`, which makes a
constraint of a class or a JSON Schema and values of the answer's text. What a constraint may contain is
`ipc.constraint`'s, what follows from it `stoker.grammar`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypedDict, get_origin

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation
from typing_extensions import TypeVar

from stoker.errors import InvalidRequestError
from stoker.ipc.constraint import Constraint, ConstraintKind, JsonSchema

__all__ = ["AnswerSchema", "FormKeywords", "Schema", "Several", "strict_schema", "take_constraint"]

T = TypeVar("T", default=Any)
"""What `schema` names: Any for a JSON Schema, and without one."""
T_co = TypeVar("T_co", covariant=True)

Schema = type[Any] | JsonSchema
"""A class that pydantic knows (its own, a dataclass, a TypedDict, `list[int]`), or a JSON Schema."""

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MAX_REASON_CHARS = 200


class Several(Protocol[T_co]):
    """A list or tuple; a `str`, which type checkers take for a sequence of its characters, is none."""

    def __contains__(self, value: object, /) -> bool:
        """As every sequence's but a text's."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """In order."""
        ...

    def __len__(self) -> int:
        """How many."""
        ...


class FormKeywords(TypedDict, Generic[T], total=False):
    """At most one of them: what the whole text of the answer has to be; T is the class of `schema`."""

    regex: str | None
    grammar: str | None
    json_schema: JsonSchema | str | None
    choice: Several[str] | None
    response_format: Mapping[str, Any] | None
    schema: type[T] | JsonSchema | None


class AnswerSchema:
    """What an answer has to be, and how its text becomes a value.

    Args:
        given: a class, whose instance the value is, or a JSON Schema, by which JSON values are checked.

    Attributes:
        json: the JSON Schema. That of a class allows no fields that the class does not have.

    Raises:
        InvalidRequestError: it is neither.
    """

    def __init__(self, given: Schema) -> None:
        if isinstance(given, Mapping | bool):
            self.json: JsonSchema = given
            self._read: Callable[[str], Any] = _reader_by_json_schema(given)
        else:
            adapter, schema = _of_class(given)
            self.json = strict_schema(schema)
            self._read = adapter.validate_json

    @classmethod
    def of(cls, given: Schema | AnswerSchema) -> AnswerSchema:
        """That of `given`, which is made once for all requests of a call."""
        return given if isinstance(given, AnswerSchema) else cls(given)

    def __repr__(self) -> str:
        return f"AnswerSchema({json.dumps(self.json)[:_MAX_REASON_CHARS]})"

    def value(self, text: str) -> Any:
        """What the answer says.

        Raises:
            ValueError: it is not of the schema; says where.
            InvalidRequestError: a reference in the schema leads nowhere.
        """
        try:
            return self._read(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = "/".join(map(str, first["loc"])) or "its top"
            raise ValueError(f"at {at}: {first['msg'][:_MAX_REASON_CHARS]}") from None


def _of_class(given: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    if isinstance(given, BaseModel):
        name = type(given).__name__
        text = f"schema is an object of the class {name}; write schema={name}, the class itself"
        raise InvalidRequestError(text, param="schema")
    if isinstance(given, str):
        text = "schema is a class or a JSON Schema, not text; JSON text is taken by json_schema"
        raise InvalidRequestError(text, param="schema")
    if not isinstance(given, type) and get_origin(given) is None:
        text = f"schema is a class or a JSON Schema, got {type(given).__name__}"
        raise InvalidRequestError(text, param="schema")
    try:
        adapter = TypeAdapter[Any](given)
        return adapter, adapter.json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError) as error:
        text = f"schema is neither a class that pydantic knows nor a JSON Schema: {error}"
        raise InvalidRequestError(text[: 2 * _MAX_REASON_CHARS], param="schema") from None


def strict_schema(schema: Any) -> Any:
    """The JSON Schema with objects of the listed fields alone, unless it says otherwise."""
    match schema:
        case Mapping():
            closed = {"additionalProperties": False} if "properties" in schema else {}
            return closed | {key: strict_schema(value) for key, value in schema.items()}
        case list():
            return [strict_schema(value) for value in schema]
        case _:
            return schema


def _reader_by_json_schema(schema: JsonSchema) -> Callable[[str], Any]:
    from jsonschema import exceptions, validators  # noqa: PLC0415 - a server starts sooner without
    from referencing import Registry  # noqa: PLC0415 - likewise
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 - likewise

    kind = validators.validator_for(schema, default=validators.validator_for({"$schema": _DRAFT}))
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        at = "/".join(map(str, error.path)) or "its top"
        text = f"the schema is wrong at {at}: {error.message[:_MAX_REASON_CHARS]}"
        raise InvalidRequestError(text, param="schema") from None
    # An empty registry: what a schema refers to is in it, or nowhere. Nothing is fetched.
    validator: Any = kind(schema, registry=Registry())

    def read(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON: {error}") from None
        try:
            problem = exceptions.best_match(validator.iter_errors(value))
        except (Unresolvable, RecursionError) as error:  # where a reference leads shows only here
            raise InvalidRequestError(f"the schema cannot be used: {error}", param="schema") from None
        if problem is not None:
            at = "/".join(map(str, problem.path)) or "its top"
            raise ValueError(f"at {at}: {problem.message[:_MAX_REASON_CHARS]}")
        return value

    return read


# ---------------------------------------------------------------- keyword arguments


def take_constraint(fields: dict[str, Any]) -> Constraint | None:
    """What the form among the keyword arguments asks for; it is taken out of them.

    Raises:
        InvalidRequestError: there are several, or one is malformed or over a limit.
    """
    given = {name: fields.pop(name) for name in _MAKERS if name in fields}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        first, second, *_ = sorted(asked)
        raise InvalidRequestError(f"{first} and {second} cannot be asked for together", param=second)
    return next((_MAKERS[name](value) for name, value in asked.items()), None)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is a text, got {type(value).__name__}", param=name)
    return value


def _of_regex(given: Any) -> Constraint:
    return Constraint.of_regex(_text("regex", given), "regex")


def _of_grammar(given: Any) -> Constraint:
    return Constraint.of_grammar(_text("grammar", given), "grammar")


def _of_choice(given: Any) -> Constraint:
    texts = given if isinstance(given, str) else list(given)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("choice is a list of texts", param="choice")
    return Constraint.of_choice(texts, "choice")


def _of_json_schema(given: Any) -> Constraint:
    if not isinstance(given, str | Mapping | bool):
        text = f"json_schema is a JSON Schema, got {type(given).__name__}; a class is asked for by schema"
        raise InvalidRequestError(text, param="json_schema")
    return _constraint_of_schema(given, "json_schema")


def _of_schema(given: Any) -> Constraint:
    return _constraint_of_schema(AnswerSchema.of(given).json, "schema")


def _constraint_of_schema(schema: JsonSchema | str, asked_as: str) -> Constraint:
    try:
        return Constraint.of_schema(schema, asked_as)
    except (TypeError, RecursionError) as error:
        text = f"{asked_as} holds what no JSON can hold: {error}"
        raise InvalidRequestError(text, param=asked_as) from None


def _of_response_format(given: Any) -> Constraint | None:
    """OpenAI's form; llama-server's, with the schema beside `json_object`, too."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema") is None:
        return Constraint(kind=ConstraintKind.JSON_OBJECT)
    schema = given.get("schema") if kind == "json_object" else None
    if kind == "json_schema" and isinstance(given.get("json_schema"), Mapping):
        schema = given["json_schema"].get("schema")
    if not isinstance(schema, Mapping | bool):
        text = (
            'response_format is {"type": "json_schema", "json_schema": {"schema": {...}}},'
            ' {"type": "json_object"} or {"type": "text"}; a class is asked for by schema'
        )
        raise InvalidRequestError(text, param="response_format")
    return _constraint_of_schema(schema, "response_format")


_MAKERS: dict[str, Callable[[Any], Constraint | None]] = {
    "regex": _of_regex,
    "grammar": _of_grammar,
    "json_schema": _of_json_schema,
    "choice": _of_choice,
    "response_format": _of_response_format,
    "schema": _of_schema,
}
