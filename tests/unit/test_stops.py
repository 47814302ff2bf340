"""Stop strings over piece boundaries."""

import pytest

from stoker.sampling.generation import StopGate


def _feed(gate, pieces):
    """Push pieces until a stop; returns the delivered pieces and the stop string."""
    out = []
    for piece in pieces:
        text, stop = gate.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    out.append(gate.flush())
    return out, None


def test_text_passes_at_once_without_stop_strings():
    """SPEC D3: nothing is held back for nothing."""
    gate = StopGate(())
    assert gate.push("anything") == ("anything", None)
    assert gate.flush() == ""


def test_a_stop_string_is_found_over_token_boundaries():
    """SPEC D3: the stop string may arrive in any number of pieces."""
    assert _feed(StopGate(["END"]), ["abc E", "N", "D tail"]) == (["abc ", "", ""], "END")


def test_overlapping_beginnings_are_not_missed():
    """SPEC D3: "aab" is found in "aaab", however it is cut."""
    for pieces in (["aaab"], ["a", "a", "a", "b"], ["aa", "ab"], ["aaa", "b"]):
        out, stop = _feed(StopGate(["aab"]), pieces)
        assert ("".join(out), stop) == ("a", "aab")


def test_only_the_end_that_may_begin_a_stop_is_held():
    """SPEC D3: held back is the longest proper beginning of a stop, and no more."""
    gate = StopGate(["\n\nUser", "<end>"])
    assert gate.push("one\ntwo\n") == ("one\ntwo", None)
    assert gate.push("\nUs") == ("", None)
    assert gate.push("e <") == ("\n\nUse ", None)
    assert gate.push("b") == ("<b", None)


def test_a_repeating_beginning_is_held_no_longer_than_needed():
    """SPEC D3: after "aaa" only "aa" can still begin "aab"."""
    gate = StopGate(["aab"])
    assert gate.push("aaa") == ("a", None)
    assert gate.push("a") == ("a", None)
    assert gate.push("c") == ("aac", None)


def test_the_stop_string_that_is_complete_first_wins():
    """SPEC D3: the earliest match counts, not the first in the list, however the text is cut."""
    for pieces in (["say b and a"], list("say b and a")):
        out, stop = _feed(StopGate(["a a", "b"]), pieces)
        assert ("".join(out), stop) == ("say ", "b")


def test_of_two_stops_that_end_together_the_one_that_began_first_counts():
    """SPEC D3: "xyz" and "z" end at one character; the text ends before "xyz"."""
    for pieces in (["wxyz"], list("wxyz")):
        out, stop = _feed(StopGate(["z", "xyz"]), pieces)
        assert ("".join(out), stop) == ("w", "xyz")


def test_a_stop_inside_a_longer_unfinished_stop_gives_the_text_between():
    """SPEC D3: "b" ends the text inside a held "ab?"; what was held before it is delivered."""
    for pieces in (["xab"], ["xa", "b"]):
        out, stop = _feed(StopGate(["abc", "b"]), pieces)
        assert ("".join(out), stop) == ("xa", "b")


def test_held_text_is_flushed_once():
    """SPEC D3: what is held is delivered at length and end of sequence."""
    gate = StopGate(["stop"])
    assert gate.push("full sto") == ("full ", None)
    assert gate.flush() == "sto"
    assert gate.flush() == ""


@pytest.mark.parametrize("stop", ["é", "日本", "🙂"])
def test_stop_strings_of_several_bytes_work(stop):
    """SPEC D3: stop strings are text, not bytes."""
    assert _feed(StopGate([stop]), [f"a{stop}b"]) == (["a"], stop)
