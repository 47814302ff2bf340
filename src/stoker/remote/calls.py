"""What the routes of calls answer, as the library's types: vectors, rankings, choices, tokens, requests."""

from __future__ import annotations

import base64
import math
from typing import Any

from stoker.client.store.file import KeptRequest
from stoker.ipc.request import Priority
from stoker.ipc.status import CallKind, GroupStatus
from stoker.ipc.usage import Usage
from stoker.tasks.choose import Choice, Choices
from stoker.tasks.embed import TextEmbeddings
from stoker.tasks.rerank import RankedDocument, Ranking


def _usage(document: dict[str, Any]) -> Usage:
    return Usage(prompt_tokens=document["usage"]["prompt_tokens"])


def embeddings_of(document: dict[str, Any]) -> TextEmbeddings:
    """Of `/v1/embeddings` with vectors in base64."""
    vectors = [base64.b64decode(entry["embedding"]) for entry in document["data"]]
    return TextEmbeddings(model=document["model"], vectors=vectors, usage=_usage(document))


def ranking_of(document: dict[str, Any]) -> Ranking:
    """Of `/v1/rerank`."""
    results = [RankedDocument(each["index"], each["relevance_score"]) for each in document["results"]]
    return Ranking(model=document["model"], results=results, usage=_usage(document))


def choices_of(document: dict[str, Any]) -> Choices:
    """Of `/v1/choose`, where an infinite score is null."""
    results = [
        Choice(**{**each, "score": math.inf if each["score"] is None else each["score"]})
        for each in document["data"]
    ]
    return Choices(model=document["model"], results=results, usage=_usage(document))


def pieces_of(document: dict[str, Any]) -> tuple[list[int], list[bytes]]:
    """Of `/tokenize` with pieces: ids, and the bytes of each."""
    entries = document["tokens"]
    pieces = [entry["piece"] for entry in entries]
    return (
        [entry["id"] for entry in entries],
        [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces],
    )


_KINDS = frozenset(CallKind)


def request_of_document(entry: dict[str, Any]) -> KeptRequest | GroupStatus:
    """An entry of `/v1/runtime/requests`."""
    priority = Priority(entry.get("priority") or entry["class"])
    common: dict[str, Any] = {
        "id": entry["id"],
        "model": entry["model"],
        "priority": priority,
        "state": entry["state"],
    }
    if entry["kind"] not in _KINDS:
        is_chat, num_tokens = entry["kind"] == "chat", entry["num_tokens"]
        return KeptRequest(**common, names=entry["names"], is_chat=is_chat, num_tokens=num_tokens)
    same = {
        name: entry[name] for name in ("num_members", "num_done", "position", "eta_s", "deadline_s", "age_s")
    }
    return GroupStatus(
        **common,
        **same,
        kind=CallKind(entry["kind"]),
        names=tuple(entry["names"]),
        usage=Usage(prompt_tokens=entry["num_tokens"]),
    )
