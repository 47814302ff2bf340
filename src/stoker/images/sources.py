"""Where a stranger's image or document comes from: a data URI, a file below an allowed folder, an address.

Owns what may be read at all and how much of it; a caller's word is trusted for nothing. What is fetched stays
out of this machine and its network: each host, that of a redirection too, is resolved once, every address it
has must be a public one, and the connection goes to the one that was checked. What the bytes are is decided
by `decode`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from stoker.base64_text import from_base64
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    import httpx

_DATA, _FILE = "data:", "file:"
_WEB = ("http:", "https:")
_HEAD_CHARS = 256
_MAX_PERCENT_CHARS = 2**20
"""Of a data URI without base64: decoding takes dozens of bytes for each."""
_PADDING_CHARS = 9
MAX_REDIRECTIONS = 3
CONNECT_S = 3.0
FETCH_S = 15.0
_PORTS = {"http": 80, "https": 443}
_PART_BYTES = 64 * 1024


class SourceLimits(Protocol):
    """What may be read from where.

    Attributes:
        noun: what errors call it.
        accept: the media types that an address is asked for.
        max_bytes: of one.
        roots: folders that files may be read from; none: no files.
        can_fetch: http and https addresses are fetched.
    """

    noun: ClassVar[str]
    accept: ClassVar[str]

    @property
    def max_bytes(self) -> int: ...  # noqa: D102 - described above

    @property
    def roots(self) -> tuple[Path, ...]: ...  # noqa: D102

    @property
    def can_fetch(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded image or document and the MIME type that came with it; empty: none did."""

    data: bytes
    declared: str = ""


def is_web(reference: str) -> bool:
    """Whether it is an address to be fetched."""
    return reference[: len("https:")].lower().startswith(_WEB)


def read_reference(reference: str, limits: SourceLimits, param: str) -> Encoded:
    """What a reference leads to; may wait for a disk or a network.

    Args:
        reference: a `data:`, `file:`, `http:` or `https:` URI.
        limits: where images may come from and how large they may be.
        param: names the image in errors.

    Raises:
        InvalidRequestError: it is none of these, is not allowed, cannot be read or is too large.
    """
    scheme = reference[: len("https:")].lower()
    if scheme.startswith(_DATA):
        return _of_data(reference, limits, param)
    if scheme.startswith(_FILE):
        return Encoded(_of_file(_path_of(reference, param), limits, param))
    if is_web(reference):
        if not limits.can_fetch:
            text = f"{param}: {limits.noun}s are not fetched here; send a data URI (allow_http_images is off)"
            raise InvalidRequestError(text, param=param)
        return Encoded(*fetched(reference, limits, param))
    text = f"{param}: a {limits.noun} is a data URI, not {reference[:40]!r}"
    raise InvalidRequestError(text, param=param)


def _of_data(uri: str, limits: SourceLimits, param: str) -> Encoded:
    head, comma, body = uri[: _HEAD_CHARS + 1].partition(",")
    if not comma:
        raise InvalidRequestError(f"{param}: the data URI has no comma behind its type", param=param)
    declared, _, coding = head[len(_DATA) :].rpartition(";")
    start = len(head) + 1
    if coding.strip().lower() != "base64":
        body = uri[start:]
        _check_length(len(body) // 3, limits, param)
        if len(body) > _MAX_PERCENT_CHARS:
            text = f"{param}: without base64 a data URI has at most {_MAX_PERCENT_CHARS} characters"
            raise InvalidRequestError(text, param=param)
        return Encoded(unquote_to_bytes(body), head[len(_DATA) :])
    _check_length((len(uri) - start) // 4 * 3 - 2, limits, param)
    return Encoded(_of_base64(uri[start:], limits.noun, param), declared)


def _of_base64(text: str, noun: str, param: str) -> bytes:
    """The bytes of base64, whose padding may be spelt with per cent signs. Raises InvalidRequestError."""
    if "%" in text[-_PADDING_CHARS:]:
        text = text[:-_PADDING_CHARS] + unquote(text[-_PADDING_CHARS:])
    try:
        return from_base64(text)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: the {noun} is not base64: {error}", param=param) from None


def _check_length(num_bytes: int, limits: SourceLimits, param: str) -> None:
    if num_bytes > limits.max_bytes:
        raise InvalidRequestError(
            f"{param}: the {limits.noun} has {num_bytes} bytes, at most {limits.max_bytes} are taken",
            param=param,
        )


def _path_of(uri: str, param: str) -> Path:
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.netloc not in {"", "localhost"} or not path.startswith("/") or "\x00" in path:
        raise InvalidRequestError(f"{param}: a file is file:///path/to/it", param=param)
    return Path(path)


def _of_file(path: Path, limits: SourceLimits, param: str) -> bytes:
    """The bytes of a regular file below one of the roots.

    What is outside is refused in the same words whether it exists or not.
    """
    if not limits.roots:
        text = f"{param}: no files are read here; send a data URI (image_roots names no folder)"
        raise InvalidRequestError(text, param=param)
    outside = InvalidRequestError(f"{param}: the file is in none of the image_roots", param=param)
    roots = [root.resolve() for root in limits.roots]
    if not any(Path(os.path.normpath(path)).is_relative_to(root) for root in (*limits.roots, *roots)):
        raise outside
    try:
        real = path.resolve(strict=True)
        root = next((root for root in roots if real.is_relative_to(root)), None)
        if root is None:
            raise outside
        file = _opened(root, real.relative_to(root).parts)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or "links lead in a circle"
        raise InvalidRequestError(f"{param}: the file cannot be read: {reason}", param=param) from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequestError(f"{param}: it is no regular file", param=param)
        _check_length(status.st_size, limits, param)
        with os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(limits.max_bytes + 1)
    except OSError as error:
        text = f"{param}: the file cannot be read: {error.strerror}"
        raise InvalidRequestError(text, param=param) from None
    finally:
        os.close(file)


def _opened(root: Path, parts: tuple[str, ...]) -> int:
    """Opened step by step without following a link: one may have been put there since it was resolved.

    Raises:
        OSError: it is not there, or not allowed.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        # A pipe must not make it wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(parts[-1] if parts else ".", flags, dir_fd=folder)
    finally:
        os.close(folder)


# ---------------------------------------------------------------- addresses


def fetched(url: str, limits: SourceLimits, param: str) -> tuple[bytes, str]:
    """The body at an address and the type it was declared as.

    Raises:
        InvalidRequestError: the host is not a public one, does not answer with a body, is too slow, or
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
                request = _request(client, here, limits.accept, param)
                answer = client.send(request, stream=True)
                try:
                    if not answer.has_redirect_location:
                        return _body(answer, limits, until_s, param)
                    here = here.join(answer.headers["location"])
                finally:
                    answer.close()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        reason = str(error)[:120] or type(error).__name__
        raise InvalidRequestError(
            f"{param}: the {limits.noun} cannot be fetched: {reason}", param=param
        ) from None
    raise InvalidRequestError(
        f"{param}: the address redirects more than {MAX_REDIRECTIONS} times", param=param
    )


def _request(client: httpx.Client, url: httpx.URL, accept: str, param: str) -> httpx.Request:
    """A request to the address that was checked, under the name that was asked for."""
    if url.scheme not in _PORTS or not url.host or url.userinfo:
        raise InvalidRequestError(f"{param}: the address is no plain http or https address", param=param)
    address = public_address(url.host, url.port or _PORTS[url.scheme], param)
    headers = {"Host": url.netloc.decode("ascii"), "Accept": accept, "Accept-Encoding": "identity"}
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


def _body(answer: httpx.Response, limits: SourceLimits, until_s: float, param: str) -> tuple[bytes, str]:
    if not answer.is_success:
        raise InvalidRequestError(f"{param}: the address answers {answer.status_code}", param=param)
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequestError(
            f"{param}: the {limits.noun} comes compressed, though that was declined", param=param
        )
    parts, num_bytes = [], 0
    for part in answer.iter_raw(_PART_BYTES):
        num_bytes += len(part)
        if num_bytes > limits.max_bytes:
            text = f"{param}: the {limits.noun} has over {limits.max_bytes} bytes"
            raise InvalidRequestError(text, param=param)
        if time.monotonic() > until_s:
            raise InvalidRequestError(f"{param}: the {limits.noun} took over {FETCH_S:.0f} s", param=param)
        parts.append(part)
    return b"".join(parts), answer.headers.get("content-type", "")
