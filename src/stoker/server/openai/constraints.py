"""Constraints of a body, by the names that OpenAI, llama-server and vLLM have for them (SPEC D2, I7)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from stoker.errors import InvalidRequestError
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.server.inbound.body import Body, Many, Named

Schema = Named[Any] | bool


class NamedSchema(Body):
    """A JSON Schema and what it is called."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")  # llama-server's, with json_object

    def constraint(self) -> Constraint | None:
        """What it asks for; None: any text. Raises InvalidRequestError."""
        if self.type == "text":
            return None
        schema = self.schema_
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                text = "response_format.json_schema.schema is missing"
                raise InvalidRequestError(text, param="response_format.json_schema")
            schema = self.json_schema.schema_
        return Constraint(kind=ConstraintKind.JSON_OBJECT) if schema is None else of_schema(schema)


class StructuredOutputs(Body):
    """vLLM's fields for the same, in one object."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None


class ConstraintFields(Body):
    """Constraints as further fields of a request; at most one of them."""

    grammar: str | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    json_schema: Schema | str | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraint(self) -> Constraint | None:
        """The one that is asked for.

        Raises:
            InvalidRequestError: there are several, or it is over a limit.
        """
        found = {name: made for name, made in self._constraints().items() if made is not None}
        if len(found) > 1:
            text = f"{' and '.join(sorted(found))} cannot be asked for together"
            raise InvalidRequestError(text, param=sorted(found)[1])
        return next(iter(found.values()), None)

    def _constraints(self) -> dict[str, Constraint | None]:
        nested = self.structured_outputs or StructuredOutputs.model_validate({})
        return {
            "grammar": _grammar(self.grammar, "grammar"),
            "regex": _regex(self.regex, "regex"),
            "choice": _choice(self.choice, "choice"),
            "json_schema": _json(self.json_schema, "json_schema"),
            "guided_json": _json(self.guided_json, "guided_json"),
            "guided_regex": _regex(self.guided_regex, "guided_regex"),
            "guided_choice": _choice(self.guided_choice, "guided_choice"),
            "guided_grammar": _grammar(self.guided_grammar, "guided_grammar"),
            "structured_outputs.json": _json(nested.json_, "structured_outputs.json"),
            "structured_outputs.regex": _regex(nested.regex, "structured_outputs.regex"),
            "structured_outputs.choice": _choice(nested.choice, "structured_outputs.choice"),
            "structured_outputs.grammar": _grammar(nested.grammar, "structured_outputs.grammar"),
        }


def of_schema(schema: Schema | str, asked_as: str = "") -> Constraint:
    """JSON of that schema; the order of its keys is the answer's. Errors name the field `asked_as`."""
    # msgspec is five times as fast as json: of 32 MiB either holds the interpreter's lock until it is done
    source = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=source, asked_as=asked_as)


def _json(schema: Schema | str | None, field: str) -> Constraint | None:
    return None if schema is None else of_schema(schema, field)


def _regex(source: str | None, field: str) -> Constraint | None:
    if source is None:
        return None
    return Constraint(kind=ConstraintKind.REGEX, source=source, asked_as=field)


def _choice(choices: list[str] | None, field: str) -> Constraint | None:
    if choices is None:
        return None
    return Constraint(kind=ConstraintKind.CHOICE, choices=tuple(choices), asked_as=field)


def _grammar(text: str | None, field: str) -> Constraint | None:
    return Constraint.of_grammar(text, field) if text else None
