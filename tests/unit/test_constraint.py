"""The constraint value: kinds, limits and how a grammar's notation is told."""

import json

import msgspec
import pytest

from stoker.errors import InvalidRequestError
from stoker.ipc.constraint import (
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    Constraint,
    ConstraintKind,
)


def nested_schema(depth):
    """A schema of that many objects in one another."""
    return "{" + '"items":{' * (depth - 1) + "}" * depth


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": ConstraintKind.REGEX, "source": " "}, "empty"),
        ({"kind": ConstraintKind.LARK, "source": "a" * (MAX_SOURCE_BYTES + 1)}, "131073 bytes"),
        ({"kind": ConstraintKind.JSON_SCHEMA, "source": nested_schema(MAX_DEPTH + 1)}, "deeper than 64 at"),
        ({"kind": ConstraintKind.GBNF, "source": f"root ::= {'(' * 65}"}, "deeper than 64 at character 73"),
        ({"kind": ConstraintKind.JSON_OBJECT, "source": "{}"}, "takes no source"),
        ({"kind": ConstraintKind.REGEX, "source": "a", "choices": ("a",)}, "takes no choices"),
        ({"kind": ConstraintKind.CHOICE}, "choice has 0 texts"),
        ({"kind": ConstraintKind.CHOICE, "choices": tuple(map(str, range(MAX_CHOICES + 1)))}, "1025 texts"),
        ({"kind": ConstraintKind.CHOICE, "choices": ("a", "")}, "choice 1 has 0 bytes"),
        ({"kind": ConstraintKind.CHOICE, "choices": ("é" * MAX_CHOICE_BYTES,)}, "choice 0 has 8192 bytes"),
        ({"kind": ConstraintKind.CHOICE, "choices": ("a", "b", "a")}, "alike"),
        ({"kind": ConstraintKind.CHOICE, "choices": ("\ud800",)}, "not valid Unicode"),
        ({"kind": ConstraintKind.REGEX, "source": "\ud800"}, "not valid Unicode"),
        ({"kind": ConstraintKind.REGEX, "source": "a", "reasoning_start": "<think>"}, "ends it"),
        ({"kind": ConstraintKind.REGEX, "source": "a", "reasoning_end": "x" * 65}, "65 characters"),
    ],
)
def test_a_constraint_over_its_limits_is_refused_with_the_number(fields, message):
    """SPEC D2, S4: limits on size, depth and count are checked before anything native sees it."""
    with pytest.raises(InvalidRequestError, match=message):
        Constraint(**fields)


def test_brackets_that_mean_no_nesting_do_not_count():
    """SPEC D2: depth is of the structure, not of the characters in strings, escapes and classes."""
    Constraint(kind=ConstraintKind.REGEX, source="[(]" * 100 + r"\(" * 100)
    Constraint(kind=ConstraintKind.GBNF, source='root ::= "' + "(" * 100 + '"')
    Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps({"const": "[" * 100}))
    Constraint(kind=ConstraintKind.JSON_SCHEMA, source=nested_schema(MAX_DEPTH))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<a> ::= 'x'", ConstraintKind.BNF),
        ('# comment\nroot ::= "x"', ConstraintKind.GBNF),
        ('start: "x"', ConstraintKind.LARK),
        ('%llguidance {}\nstart: "::="', ConstraintKind.LARK),
    ],
)
def test_the_notation_of_a_grammar_shows_in_its_rules(text, kind):
    """SPEC I7: one field `grammar` takes Lark, GBNF and BNF."""
    assert Constraint.of_grammar(text).kind is kind


def test_a_grammar_that_is_too_long_is_not_searched_to_its_end():
    """D2: searching 32 MiB for rules would hold the front up; what is over the bound is refused anyway."""
    with pytest.raises(InvalidRequestError, match="the lark has"):
        Constraint.of_grammar(" " * MAX_SOURCE_BYTES + "\nroot ::= a")


def test_a_constraint_crosses_processes_as_a_value():
    """SPEC D2: it is part of a request, which is kept and sent again after a crash."""
    constraint = Constraint(
        kind=ConstraintKind.CHOICE, choices=("a", "b"), reasoning_start="<think>", reasoning_end="</think>"
    )
    data = msgspec.msgpack.encode(constraint)
    assert msgspec.msgpack.decode(data, type=Constraint) == constraint
