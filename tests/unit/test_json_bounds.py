"""What a JSON body may hold is known before it is decoded."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InvalidRequestError, RequestTooLargeError
from stoker.server.inbound import bodies
from stoker.server.inbound.bodies import (
    MAX_DEPTH,
    MAX_ESCAPES,
    MAX_LAYOUT_BYTES,
    MAX_WIDE_BYTES,
    JsonBounds,
)

DOCUMENTS = st.dictionaries(
    st.text(),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.sampled_from(['\\"', "\\\\/", "{[,]}", "é😀"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_size=4,
)


def num_values(value):
    """Values of a document, keys not counted."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(num_values(each) for each in inner)


def took(body, cuts=(), max_values=bodies.MAX_VALUES):
    """The bounds after a body that comes in parts, and what is to be decoded of it."""
    bounds, places = JsonBounds(max_values), [0, *sorted(cuts), len(body)]
    return bounds, b"".join(bounds.take(body[at:end]) for at, end in pairwise(places))


@given(DOCUMENTS, st.booleans(), st.booleans(), st.lists(st.integers(0, 400), max_size=6))
def test_a_document_passes_unchanged_wherever_it_is_cut(document, ascii_only, slashes, cuts):
    """S4: strings, escapes and brackets are told apart across the parts in which they come."""
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    if slashes:
        body = body.replace(b"/", rb"\/")
    cuts = [cut for cut in cuts if cut <= len(body)]
    bounds, data = took(body, cuts)
    assert json.loads(data) == document
    counted = bounds._num_values
    assert num_values(document) <= counted <= 2 * num_values(document)
    whole, _ = took(body)
    assert (whole._num_values, whole._depth, bounds._depth) == (counted, 0, 0)
    assert bool(whole._num_wide) == bool(bounds._num_wide)


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        (b'{"a":[' + b"0," * 3000, 3000),
        (b'{"a":[' + b"[]," * 1500, 3000),
        (b'{"a":{' + b'"b":{},' * 1500, 3000),
        (b'{"a":"' + b"\\n" * (MAX_ESCAPES + 1), MAX_ESCAPES),
        (b'{"a":"' + "é".encode() * (MAX_WIDE_BYTES // 2 + 1), MAX_WIDE_BYTES),
        (b'{"a":"' + b"a" * MAX_WIDE_BYTES + "😀".encode(), MAX_WIDE_BYTES),
        (b'{"a":"' + b"a" * MAX_WIDE_BYTES + rb"\u00e9", MAX_WIDE_BYTES),
        (b'{"a":["' + '","'.join(["é" * 1000] * 300).encode() * 8, MAX_WIDE_BYTES),
        (b"{" + b" " * MAX_LAYOUT_BYTES, MAX_LAYOUT_BYTES),
        (b'{"a":' + b"1" * MAX_LAYOUT_BYTES, MAX_LAYOUT_BYTES),
    ],
    ids=[
        "values",
        "lists",
        "objects",
        "escapes",
        "accents",
        "emoji",
        "escaped",
        "strings",
        "space",
        "number",
    ],
)
def test_too_much_is_refused_with_the_bound(body, bound):
    """S4: 413 as soon as it is too much, whatever would come after it."""
    with pytest.raises(RequestTooLargeError) as caught:
        took(body, max_values=3000)
    assert caught.value.details == {"bound": bound}
    assert str(bound) in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10,
        b' \n"text"',
        b"null",
        b'{"a":' + b"[" * MAX_DEPTH,
        b'{"a":' + b'{"a":' * MAX_DEPTH,
        b"{" + b'"' * 100,
    ],
)
def test_what_no_body_can_begin_with_is_invalid(body):
    """S3: a typed 400."""
    with pytest.raises(InvalidRequestError):
        took(body)


def test_depth_is_that_of_what_is_open():
    """S4: many lists after each other are not deep, and brackets in strings open nothing."""
    took(b'{"a":[' + b"[[]]," * 1000 + b'"' + b"[" * 1000 + b'"]}')


def test_pictures_in_base64_are_counted_as_a_handful_of_values():
    """S4: 20 MiB beside Chinese text pass, with slashes as PHP writes them too."""
    picture = b"aGVsbG8/" * (20 * 2**17)
    for data in (picture, picture[:1000].replace(b"/", rb"\/") * 20_000):
        body = b'{"a":"' + "看图".encode() * 100_000 + b'","b":"' + data + rb'","c":"\u00e9"}'
        bounds, kept = took(body, range(0, len(body), 200_000))
        assert bounds._num_values == 4
        assert bounds._num_wide == 600_006
        assert b"\\" not in kept[:-10]
