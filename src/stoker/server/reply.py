"""What answers have in common: JSON bodies, and headers of Stoker's own."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker.chat.tools.tools import LeftOut
    from stoker.images import ImageReport
    from stoker.ipc.usage import Usage

POSITION_HEADER = "X-Stoker-Queue-Position"
ETA_HEADER = "X-Stoker-Eta"
CACHE_HEADER = "X-Stoker-Cache"
IMAGES_HEADER = "X-Stoker-Images"
IGNORED_HEADER = "X-Stoker-Ignored"
OWN_HEADERS = (POSITION_HEADER, ETA_HEADER, CACHE_HEADER, IMAGES_HEADER, IGNORED_HEADER)

_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]")
_MAX_NAMED = 8  # it is a value of a response's metadata too, which OpenAI bounds at 512 characters
_MAX_KIND_CHARS = 40


class InputUsage(msgspec.Struct, frozen=True):
    """Token counts of work that generates nothing."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> InputUsage:
        """Those of a call."""
        return cls(usage.prompt_tokens, usage.prompt_tokens)


def json_response(document: Any, status: int = 200) -> Response:
    """A document as JSON."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")


async def large_json_response(document: Any) -> Response:
    """A document of many numbers, encoded in a thread."""
    return await asyncio.to_thread(json_response, document)


def images_header(images: Iterable[ImageReport]) -> str:
    """What became of each image: `320x240`, or `4000x3000>448x336` where it was shrunk (SPEC V3)."""
    return ", ".join(
        "x".join(map(str, (one.width, one.height)))
        + (f">{one.shrunk_to[0]}x{one.shrunk_to[1]}" if one.shrunk_to else "")
        for one in images
    )


def ignored_header(left_out: Sequence[LeftOut]) -> str:
    """Which tools the model was not told of: `tools.4 (web_search), tools.5 (custom)`."""
    named = [f"{one.where} ({_UNSAFE.sub('?', one.kind[:_MAX_KIND_CHARS])})" for one in left_out[:_MAX_NAMED]]
    if len(left_out) > _MAX_NAMED:
        named.append(f"{len(left_out) - _MAX_NAMED} more")
    return ", ".join(named)
