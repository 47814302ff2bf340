"""The client: one streamed completion over plain HTTP, timed token by token.

It shares the cores with the server that it measures, so HTTP (httptools) and JSON (msgspec) are parsed in C.
One connection a request. Both sides of a comparison are driven by this same code.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.errors import BenchError
from bench.sse import DONE, SseDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_TIMEOUT_S = 900.0
HTTP_OK = 200


def _ignore() -> None:
    """Nobody wants to hear of arriving text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion to ask for: greedy, exactly `max_tokens` long.

    `extra` holds further body fields; `model` None: the first that is served.
    """

    prompt: str
    max_tokens: int
    extra: tuple[tuple[str, Any], ...] = ()
    model: str | None = None

    path: ClassVar[str] = "/v1/completions"

    def prompt_fields(self) -> dict[str, Any]:
        """How the body says what is to be continued."""
        return {"prompt": self.prompt}

    def body(self, model: str) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(
            {
                "model": model,
                **self.prompt_fields(),
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **dict(self.extra),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A finished completion. Times are seconds of one clock; token times are those of arrival here."""

    sent_s: float
    token_times_s: tuple[float, ...]
    last_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    text: str
    timed_tokens: int | None = None
    """Prompt tokens by the server's own timings (llama-server's `prompt_n`); None: it has no such number."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed for this request."""
        return self.prompt_tokens - self.cached_tokens if self.timed_tokens is None else self.timed_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first text."""
        return self.token_times_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        """Seconds from sending the request to its last event."""
        return self.last_s - self.sent_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token, by the server's own count of tokens."""
        return (self.completion_tokens - 1) / (self.last_s - self.token_times_s[0])

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens by the time to the first token."""
        return self.prompt_tokens / self.ttft_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between one arrival of text and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenStream:
    """A completion that did not come to its end, and why. Times as in `Stream`; it broke at `last_s`."""

    sent_s: float
    token_times_s: tuple[float, ...]
    last_s: float
    reason: str


class _Choice(msgspec.Struct):
    text: str = ""


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Timings(msgspec.Struct):
    prompt_n: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: dict[str, Any] | None = None


class _Exchange(asyncio.Protocol):
    """One request and its answer on one connection."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.sent_s = time.perf_counter()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_s = time.perf_counter()
        # an event loop of another make has transports of its own class
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, BenchError, msgspec.MsgspecError) as error:
            # httptools wraps what a callback raised; the cause is what explains it
            self._fail(error.__context__ or error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or BenchError("the server closed the connection before the answer was complete"))

    def on_status(self, _status: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_body(self, body: bytes) -> None:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Document(_Exchange):
    """An answer that is taken whole."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.body = bytearray()

    def on_body(self, body: bytes) -> None:
        self.body += body


class _TokenStream(_Exchange):
    """An answer of server-sent completion chunks. `on_text` is called at each arrival of text."""

    def __init__(self, request: bytes, on_text: Callable[[], None]) -> None:
        super().__init__(request)
        self._on_text = on_text
        self.token_times_s: list[float] = []
        self.last_s = 0.0
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self.timings: _Timings | None = None
        self.refusal = bytearray()
        self._events = SseDecoder()
        self._decoder = msgspec.json.Decoder(_Chunk)

    def on_body(self, body: bytes) -> None:
        if self.status != HTTP_OK:
            self.refusal += body
            return
        now_s = time.perf_counter()
        for payload in self._events.feed(body):
            if payload != DONE:
                self._take(self._decoder.decode(payload), now_s)

    def _take(self, chunk: _Chunk, now_s: float) -> None:
        if chunk.error is not None:
            raise BenchError(f"the stream carried an error: {chunk.error}")
        self.usage = chunk.usage or self.usage
        self.timings = chunk.timings or self.timings
        for choice in chunk.choices:
            self.last_s = now_s
            if choice.text:
                self.token_times_s.append(now_s)
                self.texts.append(choice.text)
                self._on_text()

    def result(self) -> Stream:
        if self.status != HTTP_OK:
            raise BenchError(
                f"the server answered {self.status}: {self.refusal.decode(errors='replace')[:300]}"
            )
        if self.usage is None or not self.last_s:
            raise BenchError("the stream ended without tokens or without its usage chunk")
        details = self.usage.prompt_tokens_details
        return Stream(
            sent_s=self.sent_s,
            # one token may be half a character: then its text never shows and the last event is its arrival
            token_times_s=tuple(self.token_times_s) or (self.last_s,),
            last_s=self.last_s,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cached_tokens=(details and details.cached_tokens) or 0,
            text="".join(self.texts),
            timed_tokens=None if self.timings is None else self.timings.prompt_n,
        )

    def broken(self, error: Exception) -> BrokenStream:
        return BrokenStream(
            sent_s=self.sent_s,
            token_times_s=tuple(self.token_times_s),
            last_s=time.perf_counter(),
            reason=str(error) or repr(error),
        )


class Client:
    """Drives one OpenAI-compatible server at `url` (http://host:port).

    Raises:
        BenchError: an address that is not plain HTTP; from the calls: a refusal or a broken stream.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BenchError(f"{url} is not an http:// address")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._model: str | None = None

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    async def complete(self, completion: Completion) -> Stream:
        """Stream one completion to its end."""
        outcome = await self.attempt(completion)
        if isinstance(outcome, BrokenStream):
            raise BenchError(outcome.reason)
        return outcome

    async def attempt(
        self,
        completion: Completion,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        on_text: Callable[[], None] = _ignore,
    ) -> Stream | BrokenStream:
        """Stream one completion, where a refusal, an error or `timeout_s` gone by is an outcome too.

        Args:
            completion: what to ask for.
            timeout_s: seconds it may take from first to last.
            on_text: called at each arrival of text; must be quick.
        """
        request = self._request(
            "POST", "/v1/completions", completion.body(completion.model or await self.model())
        )
        exchange = _TokenStream(request, on_text)
        try:
            await self._run(exchange, timeout_s)
            return exchange.result()
        except (BenchError, OSError, httptools.HttpParserError, msgspec.MsgspecError) as error:
            return exchange.broken(error)

    async def get(self, path: str) -> Any:
        """The JSON document at `path`."""
        exchange = _Document(self._request("GET", path, b""))
        await self._run(exchange)
        if exchange.status != HTTP_OK:
            raise BenchError(f"{path} answered {exchange.status}")
        return msgspec.json.decode(exchange.body)

    async def model(self) -> str:
        """Id of the first model served, asked for once."""
        if self._model is None:
            self._model = (await self.models())[0]
        return self._model

    async def models(self) -> list[str]:
        """Ids of all models served."""
        return [str(model["id"]) for model in (await self.get("/v1/models"))["data"]]

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            "Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _run(self, exchange: _Exchange, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: exchange, self._host, self._port)
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.done
        except TimeoutError:
            raise BenchError(f"no complete answer from {self.url} in {timeout_s:g} s") from None
        finally:
            transport.close()
