"""Who may talk to the server, and how much."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ForbiddenError, MachineSetupError
from stoker.server.inbound.security import HostList, KeyRing

HELLO = [{"role": "user", "content": "Say hello"}]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:9",
        "[::1]:1",
        "::1",
        "localhost.",
        "box.lan",
        "192.168.1.5:8686",
    ],
)
def test_own_names_are_allowed_with_any_port(host):
    """S4: loopback names, the bound host and what the owner added."""
    HostList(["192.168.1.5", "Box.lan"]).check([host.encode()])


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b""],
        [b"evil.example"],
        [b"localhost.evil.example"],
        [b"127.0.0.1.evil.example:80"],
        [b"localhost", b"localhost"],
        [b"\xff"],
    ],
)
def test_foreign_names_are_refused(hosts):
    """S4: a name that was pointed at this machine from outside does not pass."""
    with pytest.raises(ForbiddenError):
        HostList(["192.168.1.5"]).check(hosts)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [([], "0 headers Host"), ([b"a", b"b"], "2 headers Host"), ([b""], "an empty header Host")],
)
def test_a_request_without_one_host_is_told_what_it_lacks(hosts, says):
    """S4: and not how to allow a name that it does not have."""
    with pytest.raises(ForbiddenError, match=f"{says}; one is needed") as caught:
        HostList([]).check(hosts)
    assert "--allowed-host" not in caught.value.message


def test_a_star_allows_every_name():
    """S4: the owner may open it."""
    HostList(["*"]).check([b"any.example"])
    for hosts in ([], [b""], [b"a.example", b"b.example"]):
        with pytest.raises(ForbiddenError):
            HostList(["*"]).check(hosts)


@given(st.binary(max_size=40))
def test_any_host_bytes_are_judged_without_failing(host):
    """S4: hostile header bytes are refused, not tripped over."""
    try:
        HostList([]).check([host])
    except ForbiddenError:
        return
    raise AssertionError(host)


def test_the_host_header_decides_over_http(scripted_http):
    """S4: 403 in the one error shape, on every path."""
    for path in ("/health", "/v1/models"):
        answer = scripted_http.get(path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert scripted_http.get("/health", headers={"Host": "localhost:1234"}).status_code == 200


def test_pages_of_other_origins_are_refused(scripted, scripted_http):
    """S4: a form or script elsewhere cannot make this machine work, and gets no CORS headers."""
    body = {"messages": HELLO, "max_tokens": 1}
    own = f"http://127.0.0.1:{scripted.port}"
    for origin, status in (("https://evil.example", 403), ("null", 403), (own, 200)):
        answer = scripted_http.post("/v1/chat/completions", json=body, headers={"Origin": origin})
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers


def test_a_key_is_asked_for_everywhere_but_at_the_probes(start_server, tmp_path):
    """S4: bearer or x-api-key, any key of the file; 401 otherwise."""
    path = tmp_path / "keys"
    path.write_text("# people\nfirst-key\n\n  second-key  \n", encoding="utf-8")
    server = start_server(api_key_file=path)
    server.ready.result(60)
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        for path_ in ("/v1/models", "/metrics", "/v1/runtime", "/openapi.json", "/nothing"):
            refused = http.get(path_)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        for headers in (
            {"Authorization": "Bearer second-key"},
            {"authorization": "bearer first-key"},
            {"X-Api-Key": "first-key"},
        ):
            assert http.get("/v1/models", headers=headers).status_code == 200
        for wrong in (
            "Bearer first-ke",
            "Bearer first-key2",
            "Bearer # people",
            "Bearer x",
            "first-key",
            "Basic first-key",
        ):
            assert http.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        latin = http.get("/v1/models", headers=[(b"Authorization", b"Bearer k\xe9y")])
        assert latin.status_code == 401
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_key_file_without_keys_is_a_setup_error(tmp_path):
    """S4: rather than a server that is open by mistake."""
    empty = tmp_path / "keys"
    empty.write_text("# nothing\n", encoding="utf-8")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(MachineSetupError, match=str(path)):
            KeyRing.read(path)


def test_a_body_over_the_limit_is_a_413(start_server):
    """S4: declared, or counted while it comes in chunks; a body at the limit passes."""
    server = start_server(max_body_bytes=1000)
    server.ready.result(60)
    empty = b'{"prompt": "x", "max_tokens": 1, "user": ""}'
    fits = empty.replace(b'""', b'"' + b"u" * (1000 - len(empty)) + b'"')

    def chunks(size):
        yield from (b" " * 100 for _ in range(size // 100))

    with httpx.Client(base_url=server.url) as http:
        assert len(fits) == 1000
        assert http.post("/v1/completions", content=fits).status_code == 200
        for content in (fits + b" ", chunks(1100), chunks(1_000_000)):
            answer = http.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert http.get("/health").status_code == 200
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
        assert b" 413 " in raw.recv(4096)  # refused before any of it was sent
