"""What has been said in a chat and how the next answer is asked for.

Owns the turns, what is attached to them and the figures of the answers. Who shows them and who computes them
is the loop's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.audio import Audio
    from stoker.client.requests.stream import TextDelta
    from stoker.documents import Document
    from stoker.images.image import Image
    from stoker.ipc.request import FinishReason
    from stoker.ipc.usage import Timings, Usage

    Attachment = Image | Audio | Document

WORTH_SAYING_S = 0.1
"""A shorter wait is none to a person."""


@dataclass
class ChatReply:
    """What has come of an answer so far; whole once `usage` is there.

    Attributes:
        model: that answers.
        max_tokens: it may have.
        text: without the reasoning.
        first_token_s: seconds from the question to the first token; None: none has come.
        num_tokens: that have come.
        finish_reason: why it ended; None: it was stopped, or failed.
    """

    model: str
    max_tokens: int | None = None
    text: str = ""
    reasoning: str = ""
    first_token_s: float | None = None
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    _asked_at: float = field(default_factory=time.monotonic, repr=False)

    def take(self, delta: TextDelta) -> None:
        """Add a piece."""
        if delta.token_ids and self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._asked_at
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage, self.timings = delta.usage or self.usage, delta.timings or self.timings

    @property
    def figures(self) -> str:
        """One line: how it ended if not by itself, tokens, speed, first token, cache, wait."""
        parts = [self._ending, count_text(self.num_tokens, "token")]
        if self.timings is not None and self.timings.decode_s > 0 and self.num_tokens > 1:
            parts.append(f"{(self.num_tokens - 1) / self.timings.decode_s:.1f} tokens/s")
        if self.first_token_s is not None:
            parts.append(f"first token after {self.first_token_s:.2f} s")
        if self.usage is not None and self.usage.cached_tokens:
            parts.append(f"cached {self.usage.cached_tokens} of {self.usage.prompt_tokens}")
        if self.timings is not None and self.timings.queue_s >= WORTH_SAYING_S:
            parts.append(f"waited {self.timings.queue_s:.1f} s in the queue")
        return ", ".join(part for part in parts if part)

    @property
    def _ending(self) -> str:
        if self.finish_reason is None or self.finish_reason == "cancelled":
            return "stopped"
        if self.finish_reason == "length":
            return "cut off by -n" if self.num_tokens == self.max_tokens else "the context is full"
        if self.finish_reason == "stop" and not self.text.strip():
            return "the model ended its answer without a word"
        return ""

    def record(self) -> dict[str, Any]:
        """As JSON for programs."""
        usage, timings = self.usage, self.timings
        return {
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason or "cancelled",
            "completion_tokens": self.num_tokens,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "first_token_s": self.first_token_s,
            "queue_s": timings.queue_s if timings else None,
            "decode_s": timings.decode_s if timings else None,
        }


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of the user and the answer to it."""

    text: str
    attached: tuple[Attachment, ...]
    reply: ChatReply


@dataclass
class ChatSession:
    """The exchanges so far, and what the next turn takes along.

    Attributes:
        fields: of each request, by the names of the library.
        model: id of the one that answers; None: the default.
        system: the system message; empty: none.
        exchanges: in their order.
        attached: images, recordings and documents that go with the next turn.
        failed: text and attachments of the last turn, where no answer to it was kept.
        num_retries: of the last turn.
    """

    fields: Mapping[str, Any]
    model: str | None = None
    system: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)
    failed: tuple[str, tuple[Attachment, ...]] | None = None
    num_retries: int = 0

    def messages(self, text: str, attached: tuple[Attachment, ...]) -> list[dict[str, Any]]:
        """The conversation with a further turn of the user, as the library takes it."""
        turns: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            turns += [
                _user_turn(exchange.text, exchange.attached),
                {"role": "assistant", "content": exchange.reply.text.strip()},
            ]
        return [*turns, _user_turn(text, attached)]

    def request_fields(self) -> dict[str, Any]:
        """The fields of the next request; each retry of a turn draws with another seed."""
        fields = dict(self.fields)
        if fields.get("seed") is not None:
            fields["seed"] += self.num_retries
        if self.model is not None:
            fields["model"] = self.model
        return fields

    def start_over(self) -> int:
        """Forget the exchanges; how many there were."""
        number = len(self.exchanges)
        self.exchanges, self.failed, self.num_retries = [], None, 0
        return number

    @property
    def stats(self) -> str:
        """Figures of all answers that are kept."""
        replies = [exchange.reply for exchange in self.exchanges]
        if not replies:
            return "nothing has been answered yet"
        tokens = sum(reply.num_tokens for reply in replies)
        decode_s = sum(reply.timings.decode_s for reply in replies if reply.timings)
        prompt = sum(reply.usage.prompt_tokens for reply in replies if reply.usage)
        cached = sum(reply.usage.cached_tokens for reply in replies if reply.usage)
        speed = f" at {tokens / decode_s:.1f} tokens/s" if decode_s else ""
        answers = f"{count_text(len(replies), 'answer')}: {count_text(tokens, 'token')}{speed}"
        return f"{answers}; prompts: {count_text(prompt, 'token')}, {cached:,} of them cached"

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the last exchange has taken of the context, as far as known."""
        usage = self.exchanges[-1].reply.usage if self.exchanges else None
        return usage.prompt_tokens + usage.completion_tokens if usage else 0


def _user_turn(text: str, attached: tuple[Attachment, ...]) -> dict[str, Any]:
    return {"role": "user", "content": [*attached, text] if attached else text}
