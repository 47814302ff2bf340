"""The stop gate against a naive reading of the whole text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stoker.sampling.generation import StopGate

_TEXT = st.text(alphabet="abc", max_size=40)
_STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def _cut_naively(text, stops):
    """Read character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _pieces(text, cuts):
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(_TEXT, _STOPS, st.lists(st.integers(0, 1000), max_size=20))
def test_the_gate_cuts_where_a_naive_reader_does_however_the_text_is_split(text, stops, cuts):
    """SPEC D3: earliest match over token boundaries, overlap-correct, flushed at the end."""
    gate = StopGate(stops)
    delivered, found = "", None
    for piece in _pieces(text, cuts):
        out, found = gate.push(piece)
        delivered += out
        if found is not None:
            break
    delivered += gate.flush()
    assert (delivered, found) == _cut_naively(text, stops)


@given(_TEXT, _STOPS)
def test_the_gate_holds_exactly_the_longest_beginning_of_a_stop(text, stops):
    """SPEC D3: not a character more is held back than may begin a stop, and none less."""
    gate = StopGate(stops)
    read = ""
    delivered = ""
    for character in text:
        out, found = gate.push(character)
        read += character
        delivered += out
        if found is not None:
            break
        begins = [stop[:n] for stop in stops for n in range(len(stop)) if read.endswith(stop[:n])]
        assert read == delivered + max(begins, key=len, default="")
