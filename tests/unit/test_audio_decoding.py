"""From a file to what a model hears: formats, rates, channels, and what is refused before it costs."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from recordings import tone, wav_of
from stoker import Audio
from stoker.audio.decode import decoded
from stoker.audio.limits import AudioLimits
from stoker.audio.resample import resampled
from stoker.errors import InvalidRequestError, UnsupportedError

LIMITS = AudioLimits()
FLOAT = 3


def heard(data: bytes, rate_hz: int = 16_000, limits: AudioLimits = LIMITS) -> npt.NDArray[np.float32]:
    """The samples that a model hears of a file."""
    sound, _ = decoded(data, limits, rate_hz)
    assert sound.rate_hz == rate_hz
    return np.frombuffer(sound.pcm, "<i2").astype(np.float32) / 2**15


@pytest.mark.parametrize(
    ("num_bits", "coding", "error"),
    [(8, 1, 0.005), (16, 1, 1e-6), (24, 1, 2e-5), (32, 1, 2e-5), (32, FLOAT, 2e-5), (64, FLOAT, 2e-5)],
)
@pytest.mark.parametrize("form", ["plain", "extensible"])
def test_wav_of_every_coding_is_heard(num_bits: int, coding: int, error: float, form: str) -> None:
    """SPEC V10: with chunks before the samples; 16 bits are taken as they are."""
    samples = tone()
    data = wav_of(samples, num_bits=num_bits, coding=coding, is_extensible=form == "extensible")
    assert np.abs(heard(data) - np.rint(samples * 2**15) / 2**15).max() <= error


def test_channels_are_mixed_to_their_mean() -> None:
    """SPEC V10: stereo of a tone and its opposite is silence."""
    samples = tone()
    assert not heard(wav_of(np.stack([samples, -samples], axis=1))).any()


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 44_100, 48_000])
def test_another_rate_is_resampled(rate_hz: int) -> None:
    """SPEC V10: a tone is the same tone, but for its two ends."""
    found = heard(wav_of(tone(rate_hz=rate_hz), rate_hz))
    assert len(found) == 8_000
    assert np.abs(found - tone())[400:-400].max() < 1e-4


def test_what_the_lower_rate_cannot_hold_is_damped() -> None:
    """SPEC V10: 10 kHz at 48,000 samples a second would be 6 kHz at 16,000."""
    found = heard(wav_of(tone(rate_hz=48_000, hertz=10_000), 48_000))
    assert np.abs(found[400:-400]).max() < 1e-3


def test_resampling_does_not_depend_on_the_blocks() -> None:
    """SPEC V10, C11: equal files are equal samples, however they were read."""
    samples = tone(rate_hz=44_100).astype(np.float32)
    whole = np.concatenate(list(resampled([samples], 44_100, 16_000)))
    for num_blocks in (2, 7, 100):
        blocks = np.array_split(samples, num_blocks)
        assert np.array_equal(np.concatenate(list(resampled(blocks, 44_100, 16_000))), whole)


@pytest.mark.parametrize(("kind", "error"), [("FLAC", 2e-5), ("MP3", 0.05), ("OGG", 0.05)])
def test_compressed_recordings_are_heard(kind: str, error: float) -> None:
    """SPEC V10: with the extra `audio`."""
    file = io.BytesIO()
    soundfile.write(file, tone(1.0), 16_000, format=kind)
    found = heard(file.getvalue())
    at = 2_000  # MP3 begins with silence: what is heard is the tone, at some time
    size = min(
        np.abs(found[at + shift : at + shift + 4_000] - tone(1.0)[at : at + 4_000]).max()
        for shift in range(-40, 1300)
    )
    assert size < error


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC V10: WAV is heard all the same."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        UnsupportedError, match=r"FLAC needs the extra `audio` here \(pip install stoker\[audio\]\)"
    ):
        heard(b"fLaC" + b"\x00" * 64)
    assert heard(wav_of(tone())).any()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x00\x00\x00\x20ftypM4A ", "an MP4 or M4A file is not taken: WAV, FLAC, MP3 and Ogg are"),
        (b"\x1aE\xdf\xa3" + b"webm", "a WebM or Matroska file is not taken"),
        (b"\xff\xf1" + b"\x00" * 9, "an AAC stream is not taken"),
        (wav_of(tone(), coding=6, num_bits=8), "A-law, 8 bits is not taken: PCM of 8"),
    ],
)
def test_formats_that_are_not_taken_are_named(data: bytes, match: str) -> None:
    """SPEC V10: with those that are."""
    with pytest.raises(UnsupportedError, match=match):
        heard(data)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "nothing is no recording"),
        (b"What was said", "this is no recording that is taken: WAV"),
        (wav_of(tone())[:30], "broken"),
        (wav_of(tone())[:50], "broken: it has no samples"),
        (wav_of(tone(0.05)), "0.050 s is too short"),
        (wav_of(tone(), rate_hz=1_000), "1000 samples a second are not taken, 4000 to 192000 are"),
        (wav_of(np.zeros((9_000, 9))), "9 channels, at most 8"),
        (b"fLaC" + b"\x00" * 64, "the FLAC recording cannot be read"),
        (b"ID3" + b"\x00" * 64, "the MP3 recording cannot be read"),
    ],
)
def test_what_is_no_recording_is_refused(data: bytes, match: str) -> None:
    """SPEC V10: a 400 that says why."""
    with pytest.raises(InvalidRequestError, match=match):
        heard(data)


def test_a_recording_over_the_bounds_is_refused_by_its_header() -> None:
    """SPEC V10: bytes and seconds, with both numbers."""
    data = wav_of(tone(2.5))
    with pytest.raises(InvalidRequestError, match=r"with 2\.5 s the recordings are too long, 2 s are taken"):
        heard(data, limits=AudioLimits(max_s=2))
    with pytest.raises(InvalidRequestError, match=f"has {len(data)} bytes, at most 1000"):
        heard(data, limits=AudioLimits(max_bytes=1_000))
    with pytest.raises(InvalidRequestError, match=r"with 3\.5 s"):
        heard(data, limits=AudioLimits(max_s=3, used_s=1.0))


def test_a_wav_that_was_piped_has_no_length_and_is_heard() -> None:
    """SPEC V10: 0 and 0xFFFFFFFF are what programs write that do not know it."""
    data = wav_of(tone())
    at = data.index(b"data") + 4
    for told in (b"\x00" * 4, b"\xff" * 4):
        assert np.array_equal(heard(data[:at] + told + data[at + 4 :]), heard(data))


def test_values_that_are_no_numbers_are_silence() -> None:
    """SPEC V10: floats of a file are anybody's."""
    samples = tone()
    samples[10:20] = np.nan
    samples[20:30] = np.inf
    found = heard(wav_of(samples, num_bits=32, coding=FLOAT))
    assert not found[10:20].any()
    assert found.max() <= 1


def test_an_audio_is_a_path_bytes_or_a_data_uri(tmp_path: Path) -> None:
    """SPEC V9: the library takes all three; a file that is not there is a 400."""
    data = wav_of(tone())
    path = tmp_path / "said.wav"
    path.write_bytes(data)
    uri = "data:audio/wav;base64," + base64.b64encode(data).decode()
    expected = Audio(data).sound(16_000)[0]
    for source in (path, str(path), uri, Audio(path)):
        assert Audio(source).sound(16_000)[0] == expected
    assert Audio(path).input_audio() == {"data": base64.b64encode(data).decode(), "format": "wav"}
    assert Audio(path).sound(16_000)[1].duration_s == 0.5
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        Audio(tmp_path / "other.wav").sound(16_000)
    with pytest.raises(InvalidRequestError, match="not base64"):
        Audio("data:audio/wav;base64,!").sound(16_000)
