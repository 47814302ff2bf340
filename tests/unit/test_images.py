"""Pictures decoded: what is taken, what it becomes, what is refused and what that costs."""

from __future__ import annotations

import io
import random

import psutil
import pytest
from PIL import Image as Pillow
from PIL import ImageOps, PngImagePlugin

from pictures import bomb, encoded, first_pixel, plain, uri
from stoker.errors import InvalidRequestError
from stoker.images import Image, ImageReport
from stoker.images.decode import decoded
from stoker.images.formats import bare_png
from stoker.images.limits import ImageLimits

LIMITS = ImageLimits(edge_px=100)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
RED = Pillow.new("RGB", (60, 40), (200, 30, 40))
NOISE = Pillow.effect_noise((90, 60), 60).convert("RGB")


def show(image: Pillow.Image, kind: str = "PNG", **how):
    """The first pixel of what is taken from an image's file."""
    return first_pixel(decoded(encoded(image, kind, **how), "", LIMITS)[0])


def refusal(data: bytes, declared: str = "", limits: ImageLimits = LIMITS) -> str:
    """Why these bytes are refused."""
    with pytest.raises(InvalidRequestError) as caught:
        decoded(data, declared, limits, "messages.0.content.1.image_url")
    assert caught.value.param == "messages.0.content.1.image_url"
    return caught.value.message


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_shows_its_pixels(kind):
    """SPEC V2: six formats, recognised by their content."""
    picture, report = decoded(encoded(RED, kind), f"image/{kind.lower()}", LIMITS)
    assert report == ImageReport(60, 40, kind)
    assert (picture.width, picture.height) == (60, 40)
    assert all(abs(a - b) <= 2 for a, b in zip(first_pixel(picture), (200, 30, 40), strict=True))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_large_picture_is_shrunk_and_that_is_told(kind):
    """SPEC V3, M2: the longer edge is the tier's, the aspect is kept."""
    picture, report = decoded(encoded(RED.resize((600, 300)), kind), "", LIMITS)
    assert report == ImageReport(600, 300, kind, shrunk_to=(100, 50))
    assert (picture.width, picture.height) == (100, 50)
    assert all(abs(a - b) <= 2 for a, b in zip(first_pixel(picture), (200, 30, 40), strict=True))


def test_shrinking_in_bands_is_near_to_shrinking_at_once():
    """SPEC V3: a reduction in bands before the last step leaves what a whole Lanczos would show."""
    wave = Pillow.linear_gradient("L").resize((2000, 3001)).convert("RGB")
    picture, _ = decoded(encoded(wave), "", LIMITS)
    whole = wave.resize((picture.width, picture.height), Pillow.Resampling.LANCZOS)
    assert max(abs(a - b) for a, b in zip(picture.rgb, whole.tobytes(), strict=True)) <= 6


def test_a_small_picture_keeps_its_every_pixel():
    """SPEC V3: nothing is enlarged or resampled without need."""
    picture, report = decoded(encoded(NOISE), "", LIMITS)
    assert report.shrunk_to is None
    assert picture.rgb == NOISE.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_turned_picture_comes_upright(kind, turn):
    """SPEC V2: EXIF orientation in each format that has it, also where the picture is shrunk."""
    half = Pillow.new("RGB", (400, 200), "black")
    half.paste("white", (0, 0, 200, 200))
    exif = Pillow.Exif()
    exif[0x0112] = turn
    data = encoded(half, kind, exif=exif)
    upright = ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))).convert("RGB")
    picture, report = decoded(data, "", LIMITS)
    assert (report.width, report.height) == upright.size
    assert report.shrunk_to == (picture.width, picture.height) == upright.reduce(4).size
    ours = Pillow.frombytes("RGB", (picture.width, picture.height), picture.rgb).resize((8, 8))
    theirs = upright.resize((8, 8))
    assert max(abs(a - b) for a, b in zip(ours.tobytes(), theirs.tobytes(), strict=True)) <= 8


@pytest.mark.parametrize(
    ("image", "kind", "shown"),
    [
        (Pillow.new("I;16", (20, 20), 0x8000), "PNG", (128, 128, 128)),
        (Pillow.new("I;16", (20, 20), 0xFFFF), "TIFF", (255, 255, 255)),
        (Pillow.new("CMYK", (20, 20), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        (Pillow.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Pillow.new("1", (20, 20), 1), "PNG", (255, 255, 255)),
        (Pillow.new("L", (20, 20), 7), "JPEG", (7, 7, 7)),
        (Pillow.new("RGBA", (20, 20), (0, 0, 0, 0)), "PNG", (255, 255, 255)),
        (Pillow.new("RGBA", (300, 300), (0, 0, 0, 0)), "PNG", (255, 255, 255)),
        (Pillow.new("LA", (20, 20), (0, 128)), "PNG", (127, 127, 127)),
    ],
)
def test_pixels_of_every_kind_become_eight_bits_on_white(image, kind, shown):
    """SPEC V2: 16 bits, CMYK, one bit, grey, alpha."""
    assert show(image, kind) == shown


@pytest.mark.parametrize("size", [(20, 20), (2000, 500)])
def test_a_palette_shows_its_colours_and_its_holes_are_white(size):
    """SPEC V2: palette, with and without a transparent entry, shrunk too."""
    image = Pillow.new("P", size, 0)
    image.putpalette([9, 8, 7] * 256)
    assert show(image) == (9, 8, 7)
    assert show(image, transparency=0) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_taken():
    """SPEC V2: animations show how they begin."""
    frames = [Pillow.new("RGB", (20, 20), colour) for colour in ("red", "blue", "green")]
    for kind in ("GIF", "WEBP", "PNG"):
        shown = show(frames[0], kind, save_all=True, append_images=frames[1:])
        assert shown[0] > 240, kind
        assert max(shown[1:]) < 15, kind


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_that_ends_too_early_is_refused(kind):
    """SPEC V2: truncated anywhere, even by its last byte."""
    data = encoded(NOISE, kind)
    for cut in (0, 1, 10, 30, len(data) // 2, len(data) - 20, len(data) - 1):
        if kind != "TIFF" or cut != len(data) - 1:  # a TIFF may end with bytes of no meaning
            assert refusal(data[:cut]), cut


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_declared_has_to_be_what_it_is(kind):
    """SPEC V2: a wrong MIME type is a mistake somewhere; none, or an unspecific one, is no claim."""
    data = encoded(NOISE, kind)
    assert "declared as" in refusal(data, "image/gif" if kind != "GIF" else "image/png")
    assert "declared as" in refusal(data, "text/html")
    for declared in ("", "application/octet-stream", f"IMAGE/{kind}; q=1"):
        decoded(data, declared, LIMITS)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "second",
    [b"PK\x03\x04\x14\x00", b"<script>alert(1)</script>", b"%PDF-1.4\n", b"<?php ", b"\x89PNG\r\n\x1a\n"],
)
def test_what_is_a_picture_and_something_else_is_refused(kind, second):
    """SPEC V2: files with two faces."""
    assert refusal(encoded(NOISE, kind) + second)


def test_a_script_that_ends_like_a_picture_is_refused():
    """SPEC V2: behind the end nothing counts, whatever it looks like."""
    assert "follow" in refusal(encoded(NOISE, "GIF") + b"*/=1;alert(1);")


def test_what_a_segment_holds_is_not_the_end_of_a_photo():
    """SPEC V2: a comment may hold the marker of an end, and what looks like an archive behind it."""
    data = encoded(NOISE, "JPEG", comment=b"\xff\xd9PK\x03\x04")
    assert decoded(data, "image/jpeg", LIMITS)[1].format == "JPEG"


def test_texts_and_profiles_of_a_picture_are_not_even_unpacked():
    """SPEC V2: a few bytes of them may become megabytes; the pixels need none."""
    notes = PngImagePlugin.PngInfo()
    notes.add_text("note", "x" * 500_000, zip=True)
    data = encoded(NOISE, pnginfo=notes)
    assert b"zTXt" in data
    assert b"zTXt" not in bare_png(data)
    assert decoded(data, "", LIMITS)[0].rgb == NOISE.tobytes()


def test_bytes_that_only_fill_are_passed_over_once():
    """SPEC V2: a megabyte of what may stand before a marker; never to be looked at from each place."""
    assert "ends too early" in refusal(b"\xff\xd8" + b"\xff" * 2**20)
    data = encoded(NOISE, "JPEG")
    assert decoded(data[:2] + b"\xff" * 9 + data[2:], "", LIMITS)[1].format == "JPEG"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 5000 + encoded(NOISE, "JPEG")[2:],
        encoded(NOISE, "PNG")[:33] + b"\0\0\0\0abcd\0\0\0\0" * 70_000 + encoded(NOISE, "PNG")[33:],
        b"GIF89a" + bytes(7) + b"\x2c" + bytes(9) + b"\x02" + b"\x01\x00" * 300_000 + b"\x00\x3b",
        b"BM" + bytes(28) + b"\x01\0\0\0" + b"\x01\x05" * 600_000,
    ],
    ids=["segments", "chunks", "blocks", "runs"],
)
def test_a_picture_in_too_many_parts_is_refused(data):
    """SPEC V2: each part costs time and memory, and real pictures have few."""
    assert "too many parts" in refusal(data)


def test_a_photo_of_very_many_scans_is_refused_before_it_is_decoded():
    """SPEC V2: a scan of a dozen bytes costs as much as decoding the whole picture."""
    data = encoded(NOISE, "JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")
    assert decoded(data, "", LIMITS)[1].format == "JPEG"
    assert "too many parts" in refusal(data[:last] + data[last:-2] * 70 + data[-2:])


def test_what_looks_like_the_name_of_a_format_among_pixels_is_no_second_nature():
    """SPEC V2: four bytes of any case come about in one photo of 500."""
    comment = encoded(NOISE, "JPEG", comment=b"\x01<SvG\x02")
    assert decoded(comment, "", LIMITS)[1].format == "JPEG"
    assert "another kind" in refusal(encoded(NOISE, "JPEG", comment=b"<svg onload=x>"))


def test_a_photo_with_a_preview_behind_it_is_taken():
    """SPEC V2: cameras put further JPEGs and clips behind the first."""
    data = encoded(NOISE, "JPEG")
    assert decoded(data + data, "image/jpeg", LIMITS)[1].format == "JPEG"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "nothing"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00", "HEIC"),
        (b"\x00\x00\x00\x18ftypavif\x00\x00", "AVIF"),
        (b"PK\x03\x04", "ZIP"),
        (b"rubbish", "no picture"),
        (plain(1, 1), "too small"),
        (plain(7, 90), "too small"),
        (plain(2000, 9), "too narrow"),
        (bomb(30_000, 30_000), "too many pixels"),
        (bomb(11_000, 11_000), "too many pixels"),
        (bomb(9, 9), "cannot be read"),
        (bomb(6000, 6000, b"x" * 100_000), "ends too early"),
        (bomb(0, 0), "broken"),
        (encoded(Pillow.new("F", (20, 20)), "TIFF"), "no known range"),
        (
            b"RIFF\x16\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00" + b"\xff\x3f\x00" * 2,
            "too many pixels",
        ),
    ],
)
def test_what_is_no_picture_for_a_model_is_refused_in_words(data, said):
    """SPEC V2: 400 that says what it is, and no pixel of a bomb is decoded."""
    before = psutil.Process().memory_info().rss
    assert said in refusal(data)
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_bytes_and_pixels_are_bounded_by_the_limits():
    """SPEC V2: both bounds can be set, and both are named."""
    data = encoded(NOISE)
    assert f"at most {len(data) - 1}" in refusal(data, limits=ImageLimits(max_bytes=len(data) - 1))
    assert "at most 5399 are taken" in refusal(data, limits=ImageLimits(max_pixels=5399))
    decoded(data, "", ImageLimits(max_bytes=len(data), max_pixels=5400))
    assert "at most 5399 are taken" in refusal(encoded(NOISE, "WEBP"), limits=ImageLimits(max_pixels=16_199))
    decoded(
        encoded(NOISE, "WEBP"), "", ImageLimits(max_pixels=16_200)
    )  # its decoder takes three times as much


def test_broken_bytes_are_refused_or_shown_and_cost_no_memory():
    """SPEC V2, S3: 300 mutilated files; each ends as a picture or as our error, with nothing left behind."""
    chance = random.Random(7)
    files = [encoded(NOISE, kind) for kind in FORMATS]
    before = psutil.Process().memory_info().rss
    num_refused = 0
    for _ in range(300):
        data = bytearray(chance.choice(files))
        for _ in range(chance.randint(1, 12)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        try:
            decoded(bytes(data), "", LIMITS)
        except InvalidRequestError:
            num_refused += 1
    assert num_refused > 50
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_an_image_can_be_given_in_every_way(tmp_path):
    """SPEC V2: a path, bytes, a data URI, a Pillow image, another Image: the same picture."""
    data = encoded(NOISE)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    given = [path, str(path), data, uri(data), Pillow.open(path), NOISE, Image(path)]
    pictures = [Image(one).picture(100)[0] for one in given]
    assert {picture.content for picture in pictures} == {pictures[0].content}
    assert pictures[0].rgb == NOISE.tobytes()
    assert Image(path).name == "a.png"


def test_an_image_that_cannot_be_read_says_so(tmp_path):
    """SPEC V2: a path without a file, a folder, an address."""
    for given in (tmp_path / "none.png", tmp_path, "http://127.0.0.1/a.png", "data:image/png;base64,%%%"):
        with pytest.raises(InvalidRequestError):
            Image(given).picture()


def test_a_picture_whose_data_is_rubbish_is_not_taken_for_a_black_one():
    """SPEC V2: the decoder's own error is not lost while the picture's EXIF data is looked for."""
    assert "cannot be read" in refusal(bomb(90, 90, b"x" * 100_000))
