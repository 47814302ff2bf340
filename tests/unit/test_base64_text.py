"""Base64 in slices is base64."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import base64_text
from stoker.base64_text import from_base64


@given(st.binary(max_size=200), st.booleans(), st.booleans(), st.integers(1, 9))
def test_what_was_encoded_comes_back(data, urlsafe, padded, width):
    """SPEC V2: wherever the slices and the lines end, in both alphabets, padded or not."""
    text = (base64.urlsafe_b64encode if urlsafe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    lines = "\r\n".join(text[at : at + width] for at in range(0, len(text), width))
    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 3, 4, 1000):
            patch.setattr(base64_text, "_SLICE_CHARS", size)
            assert from_base64(text) == from_base64(lines) == data


@pytest.mark.parametrize("text", ["!", "QQ=Q", "QQ==QQ==", "Q", "QQ===", "QUI=QUI", "Qé==", "Q\0=="])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_what_is_no_base64_is_refused(text, size, monkeypatch):
    """SPEC V2: also where a slice alone would be some."""
    monkeypatch.setattr(base64_text, "_SLICE_CHARS", size)
    with pytest.raises(ValueError, match=r".+"):
        from_base64(text)
    assert from_base64("") == b""


def test_no_slice_is_longer_than_a_mebibyte(monkeypatch):
    """S4: what one call of the decoder is given, it holds the lock for."""
    lengths = []
    decode = base64.b64decode

    def noted(text, **how):
        lengths.append(len(text))
        return decode(text, **how)

    monkeypatch.setattr(base64_text.base64, "b64decode", noted)
    assert len(from_base64("QUJD" * 2**20)) == 3 * 2**20
    assert max(lengths) <= 2**20 + 4
