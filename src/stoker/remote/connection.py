"""The HTTP side of a remote runtime: requests out, documents and events in, errors as the library's own.

Owns the connections, the API key, the timeouts and how a server that is gone is noticed. A stream is read for
as long as the server says something at least every QUIET_S seconds; while a call without a stream is under
way, `/health` is asked every PING_S seconds. What is asked is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
from httpx_sse import EventSource, ServerSentEvent, SSEError

from stoker.errors import (
    AuthenticationError,
    ErrorInfo,
    InvalidRequestError,
    MachineSetupError,
    NotReadyError,
    OperatorOnlyError,
    ServerLostError,
    StokerError,
    error_from_info,
)
from stoker.remote.wire import BEAT_S

T = TypeVar("T")

CONNECT_S = 5.0
END_OF_PORTS = 65_536
ANSWER_S = 30.0
"""Of what a server answers without computing."""
QUIET_S = 6 * BEAT_S
PING_S = 10.0
_WANT_KEYS = frozenset({AuthenticationError.code, OperatorOnlyError.code})
_NO_SUCH_ROUTE = frozenset({"not_found", "method_not_allowed"})

_SHORT = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
_LONG = httpx.Timeout(None, connect=CONNECT_S)
_STREAM = httpx.Timeout(None, connect=CONNECT_S, read=QUIET_S)
# As many streams at once as the caller opens: a cancel must not wait for one of them to end.
# Idle connections end here first: a request on one that the server is closing would be lost.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=2.0)

_encoder = msgspec.json.Encoder()


class Hints(NamedTuple):
    """What messages add for whoever can do something about it.

    Attributes:
        server: where none answers.
        key: where one is missing or not enough.
    """

    server: str = "; start one with `stoker serve`, or say where one is with `url` or STOKER_URL"
    key: str = " (give it as `api_key` or in STOKER_API_KEY)"


OF_CALLERS = Hints()


class ServerConnection:
    """One server, from `open` to `close`.

    Args:
        url: of the server; the /v1 of its OpenAI API may stand behind it.
        api_key: None: it asks for none.
        hints: for messages.

    Attributes:
        url: as it is shown.
        headers: of every request.

    Raises:
        InvalidRequestError: the URL or the key is none.
    """

    def __init__(self, url: str, api_key: str | None, hints: Hints = OF_CALLERS) -> None:
        if not isinstance(url, str):
            text = f"url is a text such as http://127.0.0.1:8686, got {type(url).__name__}"
            raise InvalidRequestError(text, param="url")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        try:
            parsed = httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise InvalidRequestError(f"{url!r} is not the URL of a server: {error}", param="url") from None
        if parsed.userinfo or parsed.query:
            text = "the URL of a server holds no name, no password and no query"
            raise InvalidRequestError(text, param="url")
        has_port = 0 < (parsed.port or 1) < END_OF_PORTS
        if parsed.scheme not in {"http", "https"} or not parsed.host or not has_port:
            text = f"the URL of a server looks like http://127.0.0.1:8686, not like {url!r}"
            raise InvalidRequestError(text, param="url")
        if api_key:
            if not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
                raise InvalidRequestError("an API key is printable ASCII", param="api_key")
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._http: httpx.AsyncClient | None = None
        self._num_open = 0
        self._hints = hints

    def __repr__(self) -> str:
        return f"<ServerConnection {self.url}, {self._num_open} calls>"

    def __len__(self) -> int:
        return self._num_open

    def open(self) -> None:
        """Begin; nothing is sent yet. Idempotent."""
        if self._http is None:
            # A proxy of the environment is for the network, not for this machine.
            self._http = httpx.AsyncClient(
                base_url=self.url, headers=self.headers, timeout=_SHORT, limits=_LIMITS, trust_env=False
            )

    def take_key(self, other: ServerConnection) -> None:
        """Send the other's key from now on; calls that are under way go on with the one that they have."""
        self.headers = other.headers
        if self._http is not None:
            self._http.headers = httpx.Headers(self.headers)

    async def close(self) -> None:
        """End every call and close the connections. Idempotent."""
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    # ------------------------------------------------------------ whole answers

    async def get(self, path: str, kind: type[T]) -> T:
        """The document at `path`.

        Raises:
            ServerLostError: no server answers.
            MachineSetupError: what answers is no Stoker, or one of another version.
            StokerError: what the server said is wrong.
        """
        return self.read(await self._asked("GET", path), kind)

    async def content(self, path: str) -> bytes:
        """The bytes at `path`. Raises as `get` does."""
        return await self._asked("GET", path)

    async def delete(self, path: str) -> None:
        """Delete what is at `path`. Raises as `get` does."""
        await self._asked("DELETE", path)

    async def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer to a body, however long it takes. Raises as `get` does."""
        content = await asyncio.to_thread(_encode, body)
        asking = self._asked("POST", path, content=content, headers=headers, timeout=_LONG)
        return self.read(await self._while_alive(asking), dict[str, Any])

    async def _asked(self, method: str, path: str, **how: Any) -> bytes:
        with self._typed():
            answer = await self._client().request(method, path, **how)
        return self._checked(answer)

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work comes to; ServerLostError as soon as the server does not answer beside it."""
        working = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({working}, timeout=PING_S))[0]:
                with self._typed():
                    await self._client().get("/health")
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def get_now(self, path: str) -> dict[str, Any]:
        """As `get`, but blocks the thread, for at most ANSWER_S seconds."""
        with self._typed(), self._blocking() as http:
            return self.read(self._checked(http.get(path)), dict[str, Any])

    def post_now(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """As `post`, but blocks the thread, for at most ANSWER_S seconds."""
        with self._typed(), self._blocking() as http:
            return self.read(self._checked(http.post(path, content=_encode(body))), dict[str, Any])

    def _blocking(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=_SHORT, trust_env=False)

    # ------------------------------------------------------------ streams

    async def stream(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of a stream; closing the iterator closes the connection, which ends the work.

        Raises:
            ServerLostError: no server answers, or it said nothing for QUIET_S seconds.
            StokerError: the request was refused before its stream began.
        """
        content = None if body is None else await asyncio.to_thread(_encode, body)
        how: dict[str, Any] = {"content": content, "headers": headers, "timeout": _STREAM}
        with self._typed():
            async with self._client().stream(method, path, **how) as answer:
                if not answer.is_success:
                    await answer.aread()
                    self._checked(answer)
                async with aclosing(EventSource(answer).aiter_sse()) as events:
                    async for event in events:
                        if event.data:  # what the library makes of a comment behind an event that has an id
                            yield event

    @asynccontextmanager
    async def download(self, path: str) -> AsyncIterator[httpx.Response]:
        """An answer whose body is read while the block runs. Raises as `get` does."""
        with self._typed():
            async with self._client().stream("GET", path, timeout=_STREAM) as answer:
                if not answer.is_success:
                    await answer.aread()
                    self._checked(answer)
                yield answer

    async def upload(self, path: str, parts: AsyncIterable[bytes]) -> dict[str, Any]:
        """The answer to a body that is made as it is sent. Raises as `get` does."""
        return self.read(await self._asked("POST", path, content=parts, timeout=_STREAM), dict[str, Any])

    # ------------------------------------------------------------ errors

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            raise NotReadyError(
                f"not connected to {self.url} (any more): use the runtime in an `async with` block"
            )
        return self._http

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Errors of the block as the library's own; it counts as one open call."""
        self._num_open += 1
        try:
            yield
        except SSEError as error:
            raise self.stranger(f"{error}") from error
        except httpx.HTTPError as error:
            self._client()  # closed meanwhile: that is what ended it
            raise self._lost(error) from error
        finally:
            self._num_open -= 1

    def _lost(self, error: httpx.HTTPError) -> ServerLostError:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            text = f"no server answers at {self.url} ({reason}){self._hints.server}"
        elif isinstance(error, httpx.ReadTimeout):
            text = f"the server at {self.url} does not answer any more: it was silent for too long"
        else:
            text = (
                f"the server at {self.url} went away while it was asked ({reason}); ask again once it is back"
            )
        return ServerLostError(text, param="url", url=self.url)

    def stranger(self, what: str) -> MachineSetupError:
        """The error of an answer that is none of ours; `what` it was."""
        text = f"what listens at {self.url} is no Stoker, or one of another version: {what}"
        return MachineSetupError(text, param="url")

    def read(self, answer: bytes | str, kind: type[T]) -> T:
        """What came as JSON. Raises MachineSetupError where it is something else."""
        with self._readable():
            return msgspec.json.decode(answer, type=kind)

    def converted(self, document: Any, kind: type[T]) -> T:
        """A part of what came as JSON. Raises as `read` does."""
        with self._readable():
            return msgspec.convert(document, kind)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except msgspec.DecodeError as error:
            raise self.stranger(str(error)) from error

    def _checked(self, answer: httpx.Response) -> bytes:
        """The body of an answer that is no error."""
        if answer.is_success:
            return answer.content
        raise self.refusal(answer)

    def silent(self, for_s: float) -> ServerLostError:
        """The error of a server that has not answered for so long."""
        return ServerLostError(
            f"the server at {self.url} has not answered for {for_s:g} s", param="url", url=self.url
        )

    def refusal(self, answer: httpx.Response) -> StokerError:
        """The error that an answer tells of, which is none of success."""
        where = f"it answered {answer.status_code} to {answer.request.method} {answer.request.url.path}"
        try:
            error = answer.json()["error"]
            code, message = str(error["code"]), str(error["message"])
            info = ErrorInfo(
                code=code,
                message=message + (self._hints.key if code in _WANT_KEYS else ""),
                http_status=answer.status_code,
                param=error.get("param"),
                retry_after_s=error.get("retry_after_s") or _seconds(answer.headers.get("Retry-After")),
                details=error.get("details") or {},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return self.stranger(where)
        return self.stranger(where) if code in _NO_SUCH_ROUTE else error_from_info(info)


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdigit() else None


def _encode(body: Any) -> bytes:
    """A body as JSON. Raises InvalidRequestError where one of its texts is none."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error}") from None
