"""The page as it is served: who gets it, what keeps it to itself, and what is in the package."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path, PurePosixPath

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder
from stand_in import StandInRuntime

from stoker.server.app import create_app, server_context
from stoker.server.ui.page import STATIC, Page, shipped_page
from stoker.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES, MAX_SENT_BYTES = 204_800, 80_000
VENDOR, MANIFEST = STATIC / "vendor", STATIC.parent / "vendor.json"
MAX_PICTURE_BYTES = 150_000
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
IMPORT = re.compile(r"""(?:\bfrom\s*|\bimport\s*\(?\s*)["']([^"']+)["']""")
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
OWN_SCRIPTS = [path for path in FILES if path.suffix == ".js"]


def asked_from(peer="127.0.0.1", host="localhost", **settings):
    """A client at that address of a server with a runtime that does nothing."""
    app = create_app(server_context(StandInRuntime(is_ready=True), ServerSettings(**settings)))
    transport = httpx.ASGITransport(app, client=(peer, 4242))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


def name_of(path):
    """How a test's id names a file."""
    return path.relative_to(STATIC).as_posix()


async def test_files_travel_compressed_where_the_browser_takes_that():
    """U2: the same content either way."""
    folder = f"/ui/assets/{shipped_page().digest}"
    async with asked_from() as http:
        for name in (path.relative_to(STATIC).as_posix() for path in FILES if path.name != "index.html"):
            plain = await http.get(f"{folder}/{name}", headers={"Accept-Encoding": "identity"})
            zipped = await http.get(f"{folder}/{name}", headers={"Accept-Encoding": "gzip, br"})
            assert "content-encoding" not in plain.headers
            assert zipped.headers["content-encoding"] == "gzip"
            assert zipped.content == plain.content == (STATIC / name).read_bytes()
            assert zipped.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"


async def test_the_page_names_files_that_are_kept_for_good():
    """U1: the document itself is asked for each time, and names what belongs to its version."""
    async with asked_from() as http:
        page = await http.get("/ui")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        named = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        assert len(named) >= 5
        assert "{{" not in page.text
        for address in named:
            answer = await http.get(address)
            assert answer.status_code == httpx.codes.OK, address
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_another_content_has_another_address(tmp_path):
    """U1: what a browser keeps for good is never what another version has there; names count too."""
    digests = []
    for name, content in (("a.js", "one"), ("a.js", "two"), ("b.js", "two")):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text(content, encoding="utf-8")
        digests += [Page.read(tmp_path).digest, Page.read(tmp_path).digest]
    assert digests[::2] == digests[1::2]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("name", ["%2e%2e/page.py", "..%2f..%2fpage.py", "index.html", "no-such.js", ""])
async def test_nothing_but_the_page_s_files_is_given_out(name):
    """U1: a name that is no file of this version, or one of another version, is not found."""
    async with asked_from() as http:
        answer = await http.get(f"/ui/assets/{shipped_page().digest}/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert (await http.get("/ui/assets/0123456789abcdef/app.js")).status_code == httpx.codes.NOT_FOUND


async def test_a_browser_is_sent_to_the_page_and_others_get_what_they_got():
    """U1: clients of Ollama ask the root whether it runs."""
    async with asked_from() as http:
        sent = await http.get("/", headers=BROWSER)
        assert (sent.status_code, sent.headers["location"]) == (302, "/ui")
        assert (await http.get("/")).text == "Ollama is running"
        assert (await http.get("/", headers={"Accept": "*/*"})).text == "Ollama is running"


async def test_the_page_can_be_turned_off():
    """U1: --no-ui."""
    async with asked_from(ui=False) as http:
        assert (await http.get("/ui")).status_code == httpx.codes.NOT_FOUND
        assert "running" in (await http.get("/", headers=BROWSER)).text


async def test_without_keys_the_page_is_for_this_machine():
    """U1: whoever else reaches such a server may not operate it either."""
    async with asked_from("192.168.1.9", host="localhost") as http:
        answer = await http.get("/ui")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")
        assert (
            await http.get(f"/ui/assets/{shipped_page().digest}/app.js")
        ).status_code == httpx.codes.FORBIDDEN


async def test_with_keys_the_page_comes_without_one_and_nothing_else_does(tmp_path):
    """U3: it asks for the key by itself; what it shows needs one."""
    keys = tmp_path / "keys"
    keys.write_text("key-one\n", encoding="utf-8")
    async with asked_from("192.168.1.9", api_key_file=keys) as http:
        assert (await http.get("/ui")).status_code == httpx.codes.OK
        assert (await http.get("/", headers=BROWSER)).status_code == httpx.codes.FOUND
        for path in ("/v1/runtime/events", "/v1/runtime", "/v1/models", "/"):
            assert (await http.get(path)).status_code == httpx.codes.UNAUTHORIZED, path


async def test_a_name_that_is_not_the_server_s_gets_no_page():
    """U1: a page elsewhere that points its name at this machine."""
    async with asked_from(host="evil.example") as http:
        assert (await http.get("/ui")).status_code == httpx.codes.FORBIDDEN


async def test_the_policy_lets_in_what_is_the_server_s_own_and_no_markup():
    """U2: no inline script, no eval, no frame, no form, no string that becomes markup."""
    async with asked_from() as http:
        page = await http.get("/ui")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert not policy.keys() & {"script-src", "style-src", "connect-src"}
        assert policy["require-trusted-types-for"] == "'script'"
        closed = {"object-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"}
        assert {policy[name] for name in closed} == {"'none'"}
        assert page.headers["referrer-policy"] == "no-referrer"
        scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", page.text)
        assert scripts
        assert all("src=" in attributes and not text for attributes, text in scripts)
        assert not re.search(r"<style|\sstyle=|\son\w+=", page.text)


@pytest.mark.parametrize("path", OWN_SCRIPTS, ids=name_of)
def test_scripts_import_files_of_the_page(path):
    """U2: by relative names, as there is no map of names, and nothing of another server."""
    for name in IMPORT.findall(path.read_text(encoding="utf-8")):
        assert name.startswith(("./", "../")), name
        found = PurePosixPath(name_of(path)).parent / name
        assert (STATIC / found).resolve().is_file(), name


def test_libraries_are_what_the_manifest_says():
    """U2: package, version, licence and SHA-256 of each, and no other file beside them."""
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    assert {path.name for path in VENDOR.iterdir()} == {*manifest, "LICENSES.txt"}
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    for name, told in manifest.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == told["sha256"], name
        assert re.fullmatch(r"\d+\.\d+\.\d+", told["version"])
        assert told["license"] in {"MIT", "Apache-2.0"}
        assert told["package"] in licences


def test_all_of_the_page_is_small():
    """U2: libraries included."""
    assert sum(path.stat().st_size for path in FILES) <= MAX_BYTES
    assert sum(map(len, shipped_page().zipped.values())) <= MAX_SENT_BYTES


def test_pictures_of_the_page_are_small():
    """U6: those of the README and of docs/."""
    pictures = list((ROOT / "docs" / "images").glob("*.webp"))
    assert pictures
    assert all(path.stat().st_size <= MAX_PICTURE_BYTES for path in pictures)


def test_the_page_is_in_the_wheel(tmp_path):
    """U1: what pip installs has every file."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"stoker/server/ui/static/{name_of(path)}" for path in FILES} <= names
    assert "stoker/server/ui/vendor.json" in names
