"""Pages of other origins: which may call, and what their browsers are told."""

from __future__ import annotations

import httpx
import pytest

from stoker.errors import ForbiddenError, InvalidRequestError
from stoker.server.inbound.security import Origins
from stoker.settings import ServerSettings, load_settings

PAGE = "https://chat.example"
CHAT = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 1}
ALLOW = "access-control-allow-origin"


@pytest.fixture
def listed(start_server, tmp_path):
    """A server with keys that lists two origins."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    server = start_server(cors_origins=(PAGE, "app://notes"), api_key_file=keys)
    server.ready.result(60)
    return server


def visit(origins, origin, host=b"localhost:1", scheme="http"):
    """What an Origin means."""
    headers = {b"host": [host], b"origin": [origin]}
    return Origins(origins).visit("GET", scheme, headers)


@pytest.mark.parametrize(
    ("origin", "scheme"),
    [
        (b"https://localhost:1", "http"),
        (b"http://localhost:1", "https"),
        (b"ftp://localhost:1", "http"),
        (b"http://localhost:2", "http"),
        (b"http://localhost", "http"),
        (b"localhost:1", "http"),
        (b"null", "http"),
        (b"", "http"),
        (b"\xff", "http"),
    ],
)
def test_another_scheme_host_or_port_is_another_origin(origin, scheme):
    """S4: the whole origin is compared; the message names the remedy."""
    with pytest.raises(ForbiddenError, match="--cors-origin"):
        visit([], origin, scheme=scheme)


def test_the_own_origin_needs_no_list():
    """S4: also behind a proxy of this machine that says https."""
    assert not visit([], b"http://LOCALHOST:1").is_foreign
    assert not visit([], b"https://box.lan", b"box.lan", "https").is_foreign


def test_one_listed_origin_of_two_is_not_enough():
    """S4: a request with several is no browser's."""
    headers = {b"host": [b"localhost"], b"origin": [PAGE.encode(), b"https://evil.example"]}
    with pytest.raises(ForbiddenError, match="evil"):
        Origins([PAGE]).visit("GET", "http", headers)


def test_a_listed_page_reads_answers_errors_and_streams(listed):
    """S4: with the key that it has; who asks for no list gets none of the headers but Vary."""
    with httpx.Client(base_url=listed.url, headers={"Origin": PAGE}, timeout=60) as page:
        key = {"Authorization": "Bearer secret"}
        answers = [
            page.post("/v1/chat/completions", json=CHAT, headers=key),
            page.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=key),
            page.post("/v1/chat/completions", content=b"{", headers=key),
            page.get("/v1/nothing", headers=key),
            page.get("/v1/models"),
            page.get("/health"),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 401, 200]
    for answer in answers:
        assert (answer.headers[ALLOW], answer.headers["vary"]) == (PAGE, "Origin")
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after", "x-stoker-cache", "x-stoker-queue-position"} <= set(exposed)
        assert {"x-stoker-images", "x-stoker-ignored"} <= set(exposed)
        assert "access-control-allow-credentials" not in answer.headers
    plain = httpx.get(f"{listed.url}/health")
    assert (plain.headers.get(ALLOW), plain.headers["vary"]) == (None, "Origin")


def test_a_preflight_is_answered_without_a_key(listed):
    """S4: browsers send it without the headers that they ask about."""
    asked = {
        "Origin": "app://notes",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    for path in ("/v1/chat/completions", "/v1/models", "/v1/states/abc"):
        answer = httpx.options(f"{listed.url}{path}", headers=asked)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers[ALLOW] == "app://notes"
        assert answer.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
        assert {"GET", "POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
        assert int(answer.headers["access-control-max-age"]) > 0
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-private-network" not in answer.headers
    private = httpx.options(
        f"{listed.url}/v1/models", headers=asked | {"Access-Control-Request-Private-Network": "true"}
    )
    assert private.headers["access-control-allow-private-network"] == "true"


def test_pages_that_are_not_listed_stay_out(listed):
    """S4: 403 without a header that would let the page read it; so does a preflight."""
    for origin in ("https://evil.example", "https://chat.example.evil", "http://chat.example", "null"):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for answer in (
            httpx.options(f"{listed.url}/v1/models", headers=asked),
            httpx.get(f"{listed.url}/health", headers={"Origin": origin}),
        ):
            assert answer.status_code == 403
            assert ALLOW not in answer.headers


def test_a_star_lets_every_page_call_but_operate_nothing(start_server):
    """S4: without keys too; a page elsewhere is no program of this machine."""
    server = start_server(cors_origins=("*",))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as page:
        for origin in (PAGE, "null"):
            answer = page.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
            assert (answer.status_code, answer.headers[ALLOW]) == (200, "*")
            assert "vary" not in answer.headers
            refused = page.post("/v1/runtime/suspend", json={}, headers={"Origin": origin})
            assert (refused.status_code, refused.headers[ALLOW]) == (403, "*")
        assert page.post("/v1/runtime/resume", headers={"Origin": server.url}).status_code == 200


def test_a_foreign_host_stays_out_whatever_its_origin(listed):
    """S4: the list of origins opens no name."""
    answer = httpx.get(f"{listed.url}/health", headers={"Host": "evil.example", "Origin": PAGE})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("https://Chat.Example/", ("https://chat.example",)),
        ("http://a:80,https://b:443 , https://c:80", ("http://a", "https://b", "https://c:80")),
        (["*"], ("*",)),
        ("null", ("null",)),
        ("moz-extension://1-2", ("moz-extension://1-2",)),
    ],
)
def test_origins_are_read_as_browsers_write_them(given, found):
    """I1: case, the slash at the end and a default port make no difference."""
    assert ServerSettings(cors_origins=given).cors_origins == found
    assert load_settings({"cors_origin": given}, None)[1].cors_origins == found


@pytest.mark.parametrize(
    "given", ["chat.example", "https://", "https://a/b", "https://a?b", "//a", "https://a b"]
)
def test_what_is_no_origin_is_refused(given):
    """I1: with how one is written."""
    with pytest.raises(InvalidRequestError, match=r"scheme://host\[:port\]") as caught:
        ServerSettings(cors_origins=(given,))
    assert caught.value.param == "cors_origins"


UNVERSIONED = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    "/v1/responses/input_tokens": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/embeddings": "POST",
    "/v1/rerank": "POST",
    "/v1/models": "GET",
    "/v1/models/stand-in": "GET",
}


@pytest.mark.parametrize("path", UNVERSIONED)
def test_what_other_servers_answer_without_a_version_is_answered_so(scripted_http, path):
    """S1: the same answer, also where it is an error."""
    method = UNVERSIONED[path]
    content = b"{}" if method == "POST" else None
    headers = {"X-Request-Id": "same"}
    whole, short = (
        scripted_http.request(method, each, content=content, headers=headers) for each in (path, path[3:])
    )
    assert (short.status_code, short.json()) == (whole.status_code, whole.json())
    assert whole.status_code == (400 if method == "POST" else 200)
