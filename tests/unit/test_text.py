"""Bytes of tokens to valid UTF-8."""

import pytest

from stoker.sampling.generation import TextAssembler


@pytest.mark.parametrize("text", ["plain", "é", "日本語", "👩‍🚀 ok", "a🙂b"])
def test_characters_split_anywhere_come_out_whole(text):
    """SPEC D3: only valid UTF-8, whichever bytes a token carries."""
    data = text.encode()
    for size in range(1, 5):
        assembler = TextAssembler()
        out = [assembler.push(data[start : start + size]) for start in range(0, len(data), size)]
        assert "".join(out) == text
        assert "\ufffd" not in "".join(out)
        assert assembler.flush() == ""


def test_an_incomplete_character_waits_and_becomes_a_replacement_at_the_end():
    """SPEC D3: what is held is flushed; half an emoji is U+FFFD, never broken bytes."""
    assembler = TextAssembler()
    assert assembler.push("x🙂".encode()[:3]) == "x"
    assert assembler.push(b"") == ""
    assert assembler.flush() == "\ufffd"
    assert assembler.flush() == ""
    assert assembler.push(b"next") == "next", "nothing is held of what was flushed"


def test_bytes_that_cannot_become_a_character_are_replaced_at_once():
    """SPEC D3: a stray byte does not hold up the text behind it."""
    assembler = TextAssembler()
    assert assembler.push(b"a\xffb") == "a\ufffdb"
    assert assembler.push(b"\xf0\x9f") == ""
    assert assembler.push(b"c") == "\ufffdc"


def test_every_text_encodes_again():
    """SPEC D3: no lone surrogates get through, which UTF-8 encoders downstream would refuse."""
    assembler = TextAssembler()
    text = assembler.push(b"\xed\xa0\x80z") + assembler.flush()
    assert text.encode().decode() == text
    assert text.endswith("z")
