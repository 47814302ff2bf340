"""Numbers as people read them."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from stoker.wording import count_text, duration_text, size_text, wrong_value_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (98_000_000, "93.5 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (1023.6 * 2**20, "1 GiB"),
        (2**30, "1 GiB"),
        (3e15, "2728 TiB"),
    ],
)
def test_a_size_has_binary_units(num_bytes, text):
    """T6: one unit for one thing, and 1024 of one are one of the next."""
    assert size_text(num_bytes) == text


def test_a_count_has_the_right_plural():
    """T6: "1 thread", not "1 threads"."""
    assert count_text(1, "thread") == "1 thread"
    assert count_text(0, "thread") == "0 threads"
    assert count_text(1200, "prefix", "prefixes") == "1,200 prefixes"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.04 s"),
        (0.3, "0.3 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3580, "1.0 h"),
        (172_800, "2 days"),
    ],
)
def test_a_time_has_the_unit_that_fits_it(seconds, text):
    """T6: no rounding makes 60 s or 60 min."""
    assert duration_text(seconds) == text


class _Form(BaseModel):
    """Values of the kinds that options and settings have."""

    number: int = Field(1, ge=1, le=9)
    share: float = Field(0.5, gt=0)
    is_on: bool = False


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"number": "banana"}, "'banana' is no whole number"),
        ({"number": 1.5}, "1.5 is no whole number"),
        ({"number": 0}, "0 is less than 1"),
        ({"number": 10}, "10 is more than 9"),
        ({"share": 0}, "0 is not more than 0.0"),
        ({"share": "x"}, "'x' is no number"),
        ({"is_on": "maybe"}, "'maybe' is neither yes nor no"),
    ],
)
def test_a_wrong_value_is_named_in_our_words(fields, text):
    """T2: nothing of the library that found it."""
    with pytest.raises(ValidationError) as caught:
        _Form(**fields)
    assert wrong_value_text(caught.value.errors()[0]) == text
