"""A picture from an http or https address, where the settings allow it.

Owns keeping the request out of this machine and its network: each host, that of a redirection too, is
resolved once, every address it has must be a public one, and the connection goes to the one that was
checked.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTIONS = 3
CONNECT_S = 3.0
FETCH_S = 15.0
_PORTS = {"http": 80, "https": 443}
_PART_BYTES = 64 * 1024


def fetched(url: str, max_bytes: int, param: str) -> tuple[bytes, str]:
    """The body at an address and the type it was declared as.

    Raises:
        InvalidRequestError: the host is not a public one, does not answer with a picture, is too slow, or
            sends more than `max_bytes`.
    """
    import httpx  # noqa: PLC0415 - most programs never fetch

    until_s = time.monotonic() + FETCH_S
    timeout = httpx.Timeout(CONNECT_S)
    try:
        # A proxy of the environment would resolve the name again, and may reach other places.
        with httpx.Client(timeout=timeout, trust_env=False, follow_redirects=False) as client:
            here = httpx.URL(url)
            for _ in range(MAX_REDIRECTIONS + 1):
                request = _request(client, here, param)
                answer = client.send(request, stream=True)
                try:
                    if not answer.has_redirect_location:
                        return _body(answer, max_bytes, until_s, param)
                    here = here.join(answer.headers["location"])
                finally:
                    answer.close()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        reason = str(error)[:120] or type(error).__name__
        raise InvalidRequestError(f"{param}: the picture cannot be fetched: {reason}", param=param) from None
    raise InvalidRequestError(
        f"{param}: the address redirects more than {MAX_REDIRECTIONS} times", param=param
    )


def _request(client: httpx.Client, url: httpx.URL, param: str) -> httpx.Request:
    """A request to the address that was checked, under the name that was asked for."""
    if url.scheme not in _PORTS or not url.host or url.userinfo:
        raise InvalidRequestError(f"{param}: the address is no plain http or https address", param=param)
    address = public_address(url.host, url.port or _PORTS[url.scheme], param)
    headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
    names = {"sni_hostname": url.raw_host.decode("ascii")}
    return client.build_request("GET", url.copy_with(host=address), headers=headers, extensions=names)


def public_address(host: str, port: int, param: str) -> str:
    """An address of the host; every one of them has to be a public one. Raises InvalidRequestError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise InvalidRequestError(f"{param}: {host[:80]} is not found: {reason}", param=param) from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not _is_public(address):
            text = f"{param}: {host[:80]} is in this machine or its network; nothing is fetched from there"
            raise InvalidRequestError(text, param=param)
    return addresses[0]


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is not None:
            return _is_public(str(inner))
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # an IPv4 address behind a translator
            return _is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed.is_site_local:
            return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved)


def _body(answer: httpx.Response, max_bytes: int, until_s: float, param: str) -> tuple[bytes, str]:
    if not answer.is_success:
        raise InvalidRequestError(f"{param}: the address answers {answer.status_code}", param=param)
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequestError(
            f"{param}: the picture comes compressed, though that was declined", param=param
        )
    parts, num_bytes = [], 0
    for part in answer.iter_raw(_PART_BYTES):
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise InvalidRequestError(f"{param}: the picture has over {max_bytes} bytes", param=param)
        if time.monotonic() > until_s:
            raise InvalidRequestError(f"{param}: the picture took over {FETCH_S:.0f} s", param=param)
        parts.append(part)
    return b"".join(parts), answer.headers.get("content-type", "")
