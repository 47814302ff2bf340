"""What a model's text is made of, piece by piece as it comes (SPEC D7).

Text of the answer itself is a `str`. Pieces of one kind that follow one another are one thing, however they
are cut.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call's name is known; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all of them together are one JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is whole."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What had begun as a call was none.

    `source` is its text from the opener on. Who has not shown the call yet shows this in its place.
    """

    index: int
    source: str


@dataclass(frozen=True, slots=True)
class CallCut:
    """The text ended within a call; its arguments are what came of them. `source` is as in `CallBroken`."""

    index: int
    source: str


CallEvent = str | CallBegan | CallArguments | CallEnded | CallBroken | CallCut
"""What a text is made of when its calls are told apart."""

AnswerEvent = Reasoning | CallEvent
"""What a text is made of."""
