"""Where a stranger's picture may come from: what is read, what is not; nothing is fetched unasked."""

from __future__ import annotations

import base64
import os
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image as Pillow

from pictures import encoded, plain, uri
from stoker.errors import InvalidRequestError
from stoker.images import sources
from stoker.images.formats import format_of
from stoker.images.limits import ImageLimits
from stoker.images.sources import read_reference

PNG = plain()
WEB = ImageLimits(can_fetch=True, max_bytes=100_000)


def refusal(reference: str, limits: ImageLimits) -> str:
    """Why it is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        read_reference(reference, limits, "image")
    assert caught.value.param == "image"
    return caught.value.message


def test_a_data_uri_is_read_in_every_spelling():
    """SPEC V2: with and without padding, of either alphabet, with line breaks, with a charset, in percent."""
    text = base64.b64encode(PNG).decode()
    folded = "\r\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    urlsafe = base64.urlsafe_b64encode(PNG).decode().rstrip("=")
    percent = "".join(f"%{byte:02X}" for byte in PNG)
    for spelt in (
        f"data:image/png;base64,{text}",
        f"DATA:image/png;BASE64,{text}",
        f"data:image/png;charset=utf-8;base64,{folded}",
        f"data:image/png;base64,{urlsafe}",
        f"data:;base64,{text}",
        f"data:image/png,{percent}",
    ):
        assert read_reference(spelt, ImageLimits(), "image").data == PNG, spelt[:40]


@pytest.mark.parametrize(
    "spelt",
    [
        "data:image/png;base64",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,QQ=Q",
        "",
        "x",
        "ftp://a/b",
    ],
)
def test_rubbish_is_refused(spelt):
    """SPEC V2: 400, whatever is wrong with it."""
    assert refusal(spelt, ImageLimits())


def test_a_long_data_uri_is_refused_before_it_is_decoded():
    """SPEC V2: by its length."""
    assert "at most 1000" in refusal(uri(b"x" * 2000), ImageLimits(max_bytes=1000))


def test_percent_signs_are_decoded_in_small_numbers_alone():
    """SPEC V2: each takes dozens of bytes on its way; of base64 only the padding may be spelt so."""
    assert "without base64" in refusal("data:image/png," + "%" * (2**20 + 1), ImageLimits())
    text = base64.b64encode(PNG).decode()
    padded = text.rstrip("=") + "%3D" * text.count("=")
    assert read_reference(f"data:image/png;base64,{padded}", ImageLimits(), "image").data == PNG
    assert "not base64" in refusal("data:image/png;base64," + "%41" * 100, ImageLimits())


def test_files_are_read_below_the_roots_alone(tmp_path):
    """SPEC V2: no roots, no files; nothing outside, not by dots, links or links of folders."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "in").mkdir(parents=True)
    outside.mkdir()
    for place in (root / "a b.png", root / "in" / "b.png", outside / "c.png"):
        place.write_bytes(PNG)
    (root / "inner").symlink_to(root / "in" / "b.png")
    (root / "escape.png").symlink_to(outside / "c.png")
    (root / "folder").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    os.mkfifo(root / "pipe")
    limits = ImageLimits(roots=(root,), max_bytes=10_000)
    for name in ("a%20b.png", "in/b.png", "in/../in/b.png", "inner"):
        assert read_reference(f"file://{root}/{name}", limits, "image").data == PNG, name
    assert "image_roots" in refusal(f"file://{root}/a%20b.png", ImageLimits())
    for name in ("escape.png", "folder/c.png", "../outside/c.png", "../outside/none.png", "../root2"):
        assert "none of the image_roots" in refusal(f"file://{root}/{name}", limits), name
    for name in ("none.png", "circle", "pipe", "in", "", "a%00b", "a%20b.png/x"):
        assert refusal(f"file://{root}/{name}", limits), name
    for spelt in (
        "file:///etc/passwd",
        "file://host/a.png",
        "file:a.png",
        f"file://localhost{outside}/c.png",
    ):
        assert refusal(spelt, limits), spelt
    assert "at most 10 are" in refusal(f"file://{root}/in/b.png", ImageLimits(roots=(root,), max_bytes=10))


def test_a_link_that_is_put_there_meanwhile_is_not_followed(tmp_path, monkeypatch):
    """SPEC V2: what was resolved is opened part by part, links and all."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "in").mkdir(parents=True)
    outside.mkdir()
    (root / "in" / "a.png").write_bytes(PNG)
    (outside / "a.png").write_bytes(b"secret")
    resolve = type(root).resolve

    def slow(self, *args, **how):
        found = resolve(self, *args, **how)
        if self.name == "a.png":
            (root / "in").rename(root / "was")
            (root / "in").symlink_to(outside)
        return found

    monkeypatch.setattr(type(root), "resolve", slow)
    assert "cannot be read" in refusal(f"file://{root}/in/a.png", ImageLimits(roots=(root,)))


class _Site(BaseHTTPRequestHandler):
    """Answers with what its path says."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Host"]))
        path, _, where = self.path.partition("?")
        if path == "/redirect":
            self.send_response(302)
            self.send_header("Location", where)
            self.end_headers()
            return
        status = 200 if path in ("/a.png", "/long", "/gzip") else 404
        self.send_response(status)
        self.send_header("Content-Type", "image/png")
        if path == "/gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(PNG if path != "/long" else b"x" * 200_000)

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def site():
    """A web server on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        server.asked = []
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def as_public(monkeypatch):
    """Let loopback pass for a public host under one name, which only the test's resolver knows."""
    real = socket.getaddrinfo

    def resolve(host, *args, **how):
        if host == "pictures.example":
            return real("127.0.0.1", *args, **how)
        return real(host, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sources, "_is_public", lambda address: address == "127.0.0.1")


def test_nothing_is_fetched_unless_it_is_allowed(site):
    """SPEC V2: http only if allowed."""
    port = site.server_address[1]
    assert "allow_http_images" in refusal(f"http://127.0.0.1:{port}/a.png", ImageLimits())
    assert not site.asked


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"),  # noqa: S104
        *("10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "[fe80::1]", "[fd00::1]"),
        *("224.0.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "user@127.0.0.1", "[fec0::1]", "[::7f00:1]"),
    ],
)
def test_this_machine_and_its_network_are_never_asked(site, host):
    """SPEC V2: loopback, private, link-local and mapped addresses, in any spelling, by name or number."""
    port = site.server_address[1]
    assert refusal(f"http://{host}:{port}/a.png", WEB)
    assert not site.asked


def test_a_picture_is_fetched_from_the_address_that_was_checked(site, as_public):
    """SPEC V2: under its own name; what it is declared as comes along."""
    port = site.server_address[1]
    found = read_reference(f"http://pictures.example:{port}/a.png", WEB, "image")
    assert (found.data, found.declared) == (PNG, "image/png")
    assert site.asked == [("/a.png", f"pictures.example:{port}")]


def test_a_redirection_is_checked_like_the_first_address(site, as_public):
    """SPEC V2: it may not lead into this network, to another scheme, or round and round."""
    port = site.server_address[1]
    here = f"http://pictures.example:{port}"
    assert read_reference(f"{here}/redirect?/a.png", WEB, "image").data == PNG
    site.asked.clear()
    assert "this machine" in refusal(f"{here}/redirect?http://127.0.0.2:{port}/a.png", WEB)
    assert "plain http" in refusal(f"{here}/redirect?file:///etc/passwd", WEB)
    assert [path.partition("?")[0] for path, _ in site.asked] == ["/redirect", "/redirect"]
    assert "redirects more" in refusal(f"{here}/redirect?/redirect?/redirect?/redirect?/redirect?/a.png", WEB)


def test_what_answers_badly_is_refused(site, as_public):
    """SPEC V2: an error, too many bytes, an encoding that was declined, nobody there."""
    port = site.server_address[1]
    here = f"http://pictures.example:{port}"
    assert "404" in refusal(f"{here}/none", WEB)
    assert "over 100000 bytes" in refusal(f"{here}/long", WEB)
    assert "compressed" in refusal(f"{here}/gzip", WEB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert refusal(f"http://pictures.example:{free.getsockname()[1]}/a.png", WEB)


def test_a_jpeg_is_not_searched_for_a_marker_that_may_come_anywhere():
    """SPEC V2: between segments it comes at once; a decoder looks at megabytes there byte by byte."""
    picture = encoded(Pillow.new("RGB", (40, 30)), "JPEG")
    with pytest.raises(InvalidRequestError, match="ends too early"):
        format_of(picture[:2] + b"\xff\x00" * 2**20 + picture[2:], "", "image")
    for good in (
        picture[:2] + b"\xff" * 100 + picture[2:],
        picture[:-2] + b"\xff\x00" * 3 * 2**20 + picture[-2:],
        picture[:-2] + b"\x00" * (2**20 - len(picture) % 2**20) + picture[-2:],
    ):
        assert format_of(good, "", "image") == "JPEG"
