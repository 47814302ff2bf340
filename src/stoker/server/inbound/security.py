"""Who may talk to the server and who may operate it (SPEC S4): Host allow-list, API keys, pages of origins.

Pure: header values in, identities and headers out; `gate` applies them to each request. Also what keeps
callers of different keys apart.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import AuthenticationError, ForbiddenError, MachineSetupError, OperatorOnlyError
from stoker.server.inbound.address import is_loopback
from stoker.server.inbound.named_keys import ANYTHING, NamedKeys, Permit
from stoker.server.reply import OWN_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_BEARER = b"bearer "
_KEY_NEEDED = (
    "an operator's key is needed for this: one of the file that --admin-key-file names, or of [keys.NAME]"
    " with admin = true"
)
_TURNED_OFF = (
    "this is for operators, and the server asks for keys but knows none of an operator (--admin-key-file, or"
    " admin = true in [keys.NAME]): no client may do it over HTTP"
)
_LOCAL_ONLY = (
    "a server without keys lets only programs of its own machine do this; with --admin-key-file an operator's"
    " key is taken from anywhere"
)
_DIGEST_BYTES = 32  # 64 hexadecimal digits: no longer than a salt or a BLAKE2b key may be


class HostList:
    """Names a request may call this server by, whatever the port.

    A page elsewhere can point its own name at this machine (DNS rebinding); the browser then sends that
    name as Host, which is how it is told apart. `*` allows every name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(_host_name(name) for name in (*LOOPBACK_NAMES, *names))

    def __repr__(self) -> str:
        return f"HostList({sorted(self._names)})"

    def check(self, hosts: list[bytes]) -> None:
        """Refuse a foreign Host.

        Args:
            hosts: values of the header; exactly one is right.

        Raises:
            ForbiddenError: it is not allowed.
        """
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not host:
            what = f"{len(hosts)} headers Host" if len(hosts) != 1 else "an empty header Host"
            raise ForbiddenError(f"the request has {what}; one is needed, with the name of this server")
        if "*" not in self._names and _host_name(host) not in self._names:
            raise ForbiddenError(
                f"Host {host[:200]!r} is not allowed; the owner of this server can allow it with"
                f" --allowed-host {_host_name(host)[:200]}"
            )


def _host_name(host: str) -> str:
    """The name without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, rest = host.partition(":")
    return (host if ":" in rest else name).rstrip(".")


class KeyRing:
    """API keys that are accepted; an empty ring accepts everybody."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._keys)} keys)"

    @classmethod
    def read(cls, path: Path | None) -> KeyRing:
        """The keys of a file: one a line, `#` begins a comment line; no file: no key is asked for.

        Raises:
            MachineSetupError: the file cannot be read or holds no key.
        """
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise MachineSetupError(f"cannot read the API key file {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise MachineSetupError(f"the API key file {path} is no text") from None
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise MachineSetupError(f"the API key file {path} holds no key; write one a line")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, authorization: bytes | None, x_api_key: bytes | None, *, is_needed: bool = False) -> str:
        """Compare in constant time with every key.

        Args:
            authorization: value of that header, `Bearer KEY`.
            x_api_key: value of that header, the key itself.
            is_needed: a key is asked for though there is none on the ring.

        Returns:
            A digest that tells the keys apart; empty where none is asked for.

        Raises:
            AuthenticationError: no key came, or none that is on the ring.
        """
        if not (self._keys or is_needed):
            return ""
        if _given(authorization, x_api_key) is None:
            raise AuthenticationError("an API key is needed: send it as `Authorization: Bearer KEY`")
        digest = self.find(authorization, x_api_key)
        if digest is None:
            raise AuthenticationError("the API key is not one that this server accepts")
        return digest

    def find(self, authorization: bytes | None, x_api_key: bytes | None) -> str | None:
        """The digest of the key that came, or None if none is on the ring; compares as `check` does."""
        given = _given(authorization, x_api_key)
        if given is None:
            return None
        is_known = any([hmac.compare_digest(given, key) for key in self._keys])  # noqa: C419 - compare with all
        return (
            hashlib.blake2b(given, digest_size=_DIGEST_BYTES, person=b"stoker-key").hexdigest()
            if is_known
            else None
        )


def _given(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return x_api_key


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request.

    Attributes:
        key_digest: tells the API keys apart; empty: it came without one that counts.
        refusal: why the sender may not operate the server; empty: they may.
        permit: what their requests may ask for.
    """

    key_digest: str = ""
    refusal: str = ""
    permit: Permit = ANYTHING

    @property
    def is_operator(self) -> bool:
        """Whether the sender may operate the server."""
        return not self.refusal

    def require_operator(self) -> None:
        """Raises OperatorOnlyError where the sender may not operate the server."""
        if self.refusal:
            raise OperatorOnlyError(self.refusal)

    def may_steer(self, owner: str) -> bool:
        """Whether requests of that owner may be ended, paused, resumed and attached to by their ids."""
        return self.is_operator or owner == self.key_digest

    def may_see(self, owner: str) -> bool:
        """Whether ids and stories of that owner's requests are shown: without a key only to an operator."""
        return self.is_operator or (owner != "" and owner == self.key_digest)


class Access:
    """Tells who sends a request from its keys and its address.

    Args:
        keys: what ordinary requests need one of; empty: they need none.
        operators: keys that may operate the server besides. Without any, a server that asks for keys is not
            operated over HTTP, and one that asks for none by programs of its own machine alone.
        named: keys of the settings; with any, ordinary requests need a key.
    """

    def __init__(self, keys: KeyRing, operators: KeyRing, named: NamedKeys | None = None) -> None:
        self._keys = keys
        self._operators = operators
        self._named = NamedKeys({}) if named is None else named

    def __repr__(self) -> str:
        return f"Access({self._keys!r}, operators: {self._operators!r}, {self._named!r})"

    @property
    def asks_for_keys(self) -> bool:
        """Whether there is any key, so that callers are told apart by theirs."""
        return bool(self._keys or self._operators or self._named)

    def replace(self, keys: KeyRing, operators: KeyRing) -> None:
        """From now on those are the keys of the files."""
        self._keys, self._operators = keys, operators

    def identify(self, authorization: bytes | None, x_api_key: bytes | None, peer: str) -> Identity:
        """Who it is.

        Args:
            authorization: as in `KeyRing.check`.
            x_api_key: likewise.
            peer: address of the client; empty: not known.

        Raises:
            AuthenticationError: a key is needed, and none came that the server accepts.
        """
        refusal = _KEY_NEEDED if self._operators or self._named.has_admin else _TURNED_OFF
        given = _given(authorization, x_api_key)
        named = self._named.find(given) if given is not None else None
        if named is not None:
            return Identity(named.digest, "" if named.settings.admin else refusal, named.permit)
        operator = self._operators.find(authorization, x_api_key)
        if operator is not None:
            return Identity(operator)
        digest = self._keys.check(authorization, x_api_key, is_needed=bool(self._named))
        if self._operators or self._keys:
            return Identity(digest, refusal)
        return Identity(digest, "" if is_loopback(peer) else _LOCAL_ONLY)


def salt_of(key_digest: str, cache_salt: str) -> str:
    """The salt under which a request is cached: callers of different API keys never share (SPEC C1).

    A prompt whose beginning was computed before answers sooner and says so in its usage. Whoever shares that
    with another caller can try beginnings and learn from the clock what the other has asked. One key with one
    salt shares; where no key is asked for, the caller's salt alone counts.

    Args:
        key_digest: from `KeyRing.check`; neither it nor the key can be read from the result.
        cache_salt: the request's own.
    """
    if not key_digest:
        return cache_salt
    digest = hashlib.blake2b(
        cache_salt.encode(), digest_size=_DIGEST_BYTES, key=key_digest.encode(), person=b"stoker-salt"
    )
    return digest.hexdigest()


ANY = "*"
_EXPOSED = ", ".join(("X-Request-Id", "Request-Id", "Retry-After", *OWN_HEADERS)).encode()
_METHODS = b"GET, POST, DELETE"
_MAX_AGE_S = b"600"
_VARY = b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


@dataclass(frozen=True, slots=True)
class Visit:
    """A request as far as its Origin goes.

    Attributes:
        is_foreign: it comes from a page of a listed origin.
        is_preflight: the browser only asks whether the page may send something; `headers` are the answer.
        headers: of its answer, so that the page may read it.
    """

    is_foreign: bool = False
    is_preflight: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Origins:
    """Origins whose pages may call.

    Args:
        listed: such as `https://chat.example`; `*` is every one, `null` that of files and sandboxed frames.
    """

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._listed = frozenset(listed)

    def __repr__(self) -> str:
        return f"Origins({sorted(self._listed)})"

    def visit(self, method: str, scheme: str, headers: Mapping[bytes, list[bytes]]) -> Visit:
        """What a request's Origin means for it.

        Args:
            method: of the request.
            scheme: http, or https where a proxy of this machine says so.
            headers: values by name in lower case.

        Raises:
            ForbiddenError: a page of another origin sends it, and that one is not listed.
        """
        own = f"{scheme}://{_text(headers.get(b'host', []))}".lower()
        foreign = [origin for each in headers.get(b"origin", ()) if (origin := _text([each]).lower()) != own]
        strange = [origin for origin in foreign if not self._listed.intersection((origin, ANY))]
        if strange:
            raise ForbiddenError(
                f"Origin {strange[0][:99]!r} is neither the server's own, {own[:99]!r}, nor listed by the"
                " owner with --cors-origin"
            )
        if not foreign:
            return Visit(headers=self._vary())
        allowed = b"*" if ANY in self._listed else foreign[0].encode("latin-1")
        shown = (b"access-control-allow-origin", allowed)
        if method == "OPTIONS" and b"access-control-request-method" in headers:
            return Visit(is_foreign=True, is_preflight=True, headers=(shown, *_preflight(headers)))
        exposed = (b"access-control-expose-headers", _EXPOSED)
        return Visit(is_foreign=True, headers=(shown, exposed, *self._vary()))

    def _vary(self) -> tuple[tuple[bytes, bytes], ...]:
        """For caches: another origin has another answer."""
        return ((b"vary", b"Origin"),) if self._listed - {ANY} else ()


def _preflight(headers: Mapping[bytes, list[bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    found = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _MAX_AGE_S),
        (b"vary", _VARY),
    ]
    if asked := headers.get(b"access-control-request-headers"):
        found.append((b"access-control-allow-headers", b", ".join(asked)))
    if headers.get(b"access-control-request-private-network") == [b"true"]:
        found.append((b"access-control-allow-private-network", b"true"))
    return tuple(found)


def _text(values: list[bytes]) -> str:
    return values[0].decode("latin-1") if values else ""
