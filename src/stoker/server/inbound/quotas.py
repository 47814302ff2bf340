"""Requests and tokens a minute of named keys: a bucket each, filled as time goes by.

A request takes one from its key's requests when it arrives, and its tokens, prompt and answer, when it ends.
Until then it holds what it may come to take, so that many at once are not more than one after the other. One
that begins with a little left may end below nothing; the next then waits for longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import RequestStatus
    from stoker.server.inbound.named_keys import NamedKey, NamedKeys

_MINUTE_S = 60.0
_CHARS_A_TOKEN = 4
"""Of a text, before it is tokenised; what it really has is counted when its request ends."""


@dataclass(slots=True)
class Bucket:
    """So many a minute, as many at once.

    Attributes:
        per_minute: what flows in, and the most that it holds.
        level: what it held at `at_s`; below 0: more was taken than there was.
        held: what those that have not ended may come to take.
    """

    per_minute: int
    level: float
    at_s: float
    held: dict[str, float] = field(default_factory=dict)

    def fill(self, per_minute: int, now: float) -> None:
        """Let flow in what came since it was last looked at, for a limit that may have changed."""
        self.level = min(per_minute, self.level + (now - self.at_s) * per_minute / _MINUTE_S)
        self.per_minute, self.at_s = per_minute, now

    def wait_s(self) -> float:
        """Seconds until there is one more than what is held; 0: there is now."""
        missing = 1.0 - (self.level - sum(self.held.values()))
        return max(0.0, missing) * _MINUTE_S / self.per_minute


class Quotas:
    """What named keys have used.

    Args:
        keys: with their limits as they are now.
        now: seconds on a monotonic clock.
    """

    def __init__(self, keys: NamedKeys, now: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._now = now
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def __repr__(self) -> str:
        return f"Quotas({len(self._requests)} limited by requests, {len(self._tokens)} by tokens)"

    def check(self, owner: str) -> None:
        """Refuse a key that has used up what it may; takes nothing.

        Args:
            owner: digest of the key.

        Raises:
            RateLimitError: `retry_after_s` says when it may again.
        """
        key = self._keys.of(owner)
        if key is None:
            return
        limits = key.settings
        self._check(key, self._bucket(self._requests, key, limits.requests_per_minute), "requests")
        self._check(key, self._bucket(self._tokens, key, limits.tokens_per_minute), "tokens")

    def arrived(self, request_id: str, owner: str, request: GenerateRequest, num_members: int) -> None:
        """Count a request, or a call of several that are like it, and hold the tokens that it may take.

        Raises:
            RateLimitError: see `check`; nothing is counted.
        """
        key = self._keys.of(owner)
        if key is None:
            return
        self.check(owner)
        if requests := self._bucket(self._requests, key, key.settings.requests_per_minute):
            requests.level -= 1
        if tokens := self._bucket(self._tokens, key, key.settings.tokens_per_minute):
            asked = most_tokens(request, tokens.per_minute) * num_members
            tokens.held[request_id] = min(asked, tokens.per_minute)

    def ended(self, status: RequestStatus) -> None:
        """Take what a request has used, however it ended."""
        key = self._keys.of(status.owner)
        if key is None:
            return
        if tokens := self._bucket(self._tokens, key, key.settings.tokens_per_minute):
            tokens.held.pop(status.request_id, None)
            tokens.level -= status.prompt_tokens + status.completion_tokens

    def _bucket(self, buckets: dict[str, Bucket], key: NamedKey, per_minute: int | None) -> Bucket | None:
        """The key's bucket as it is now; None: it has no such limit."""
        if per_minute is None:
            buckets.pop(key.digest, None)
            return None
        now = self._now()
        bucket = buckets.setdefault(key.digest, Bucket(per_minute, per_minute, now))
        bucket.fill(per_minute, now)
        return bucket

    @staticmethod
    def _check(key: NamedKey, bucket: Bucket | None, what: str) -> None:
        if bucket is None or not (wait_s := bucket.wait_s()):
            return
        name, per_minute = key.permit.name, bucket.per_minute
        text = f"the key {name!r} may use {per_minute} {what} a minute; it may ask again in {wait_s:.1f} s"
        raise RateLimitError(text, retry_after_s=wait_s, limit=what, per_minute=per_minute)


def most_tokens(request: GenerateRequest, unknown: int) -> float:
    """What a request may come to take; `unknown` stands for an answer without an end."""
    prompt = request.prompt
    num_prompt = len(prompt) // _CHARS_A_TOKEN if isinstance(prompt, str) else len(prompt)
    answer = unknown if request.max_tokens is None else request.max_tokens
    return num_prompt + answer * request.n
