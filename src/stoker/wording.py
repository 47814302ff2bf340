"""How numbers read in what people see: sizes, counts, times, and what is wrong with a value.

One text for one thing everywhere: binary units, the right plural, and the same words for the same mistake.
"""

from __future__ import annotations

from typing import Any

_PARAM_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_THREE_DIGITS = 99.95  # from there on no decimal is shown
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400
_HUNDREDTHS_BELOW_S, _TENTHS_BELOW_S = 0.095, 9.95

_WRONG = {
    "int_parsing": "is no whole number",
    "int_type": "is no whole number",
    "int_from_float": "is no whole number",
    "float_parsing": "is no number",
    "float_type": "is no number",
    "bool_parsing": "is neither yes nor no",
    "bool_type": "is neither yes nor no",
    "string_type": "is no text",
    "path_type": "is no path",
    "tuple_type": "is no list",
    "list_type": "is no list",
    "finite_number": "is no finite number",
    "greater_than_equal": "is less than {ge}",
    "greater_than": "is not more than {gt}",
    "less_than_equal": "is more than {le}",
    "less_than": "is not less than {lt}",
    "literal_error": "is none of {expected}",
    "enum": "is none of {expected}",
}
"""What is wrong, by pydantic's name of it."""


def size_text(num_bytes: float) -> str:
    """Bytes in binary units: "812 B", "64 MiB", "93.5 MiB", "1.5 GiB"."""
    if num_bytes < _STEP:
        return f"{num_bytes:.0f} B"
    power = 1
    while num_bytes >= (_STEP - 0.5) * _STEP**power and power < len(_UNITS):
        power += 1
    number = num_bytes / _STEP**power
    text = f"{number:.{0 if number >= _THREE_DIGITS else 1}f}".removesuffix(".0")
    return f"{text} {_UNITS[power - 1]}"


def params_text(num_params: int) -> str:
    """Parameters of a model: "134.5M", "7.2B"."""
    for size, letter in _PARAM_UNITS:
        if num_params >= size:
            return f"{num_params / size:.1f}{letter}"
    return str(num_params)


def count_text(number: int, one: str, many: str | None = None) -> str:
    """How many of something: "1 thread", "1,200 tokens"; `many` is a plural that does not end in -s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def duration_text(seconds: float) -> str:
    """A time: "0.04 s", "0.3 s", "42 s", "5 min", "1.5 h", "3 days"."""
    if seconds < _HUNDREDTHS_BELOW_S:
        return f"{seconds:.2f} s"
    if seconds < _TENTHS_BELOW_S:
        return f"{seconds:.1f} s"
    if seconds < _MINUTE_S - 0.5:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S - _MINUTE_S / 2:
        return f"{seconds / _MINUTE_S:.0f} min"
    if seconds < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.1f} h"
    return f"{seconds / _DAY_S:.0f} days"


def wrong_value_text(problem: dict[str, Any]) -> str:
    """What is wrong with a value: "'banana' is no whole number".

    Args:
        problem: one of `errors()` of a pydantic `ValidationError`.
    """
    text = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":  # ours, which says what it got
        return text
    words = _WRONG.get(str(problem["type"]))
    if words is None:
        return f"{text}, got {problem['input']!r}"
    return f"{problem['input']!r} {words.format_map(problem.get('ctx', {}))}"
