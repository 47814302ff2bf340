"""A conversation in a file: Markdown for people, JSON for programs.

Apart because what a file looks like is its own subject; the loop alone asks for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stoker.audio import Audio
from stoker.documents import Document
from stoker.errors import InvalidRequestError
from stoker.images.image import Image
from stoker.private import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.cli.chat.session import ChatSession

_KEYS = {Image: "images", Audio: "recordings", Document: "documents"}


def save(session: ChatSession, file: Path, *, may_replace: bool) -> None:
    """Write the conversation, readable by its owner alone; the name's end says in which form.

    Raises:
        InvalidRequestError: the name ends in neither .md nor .json, its folder is not there, or there is
            such a file.
        OSError: it cannot be written.
    """
    forms = {".md": _markdown, ".json": _json}
    form = forms.get(file.suffix.lower())
    if form is None:
        raise InvalidRequestError(f"{file}: the name has to end in .md or .json", param="file")
    if not file.parent.is_dir():
        raise InvalidRequestError(f"{file}: there is no folder {file.parent}", param="file")
    if not may_replace and file.exists():
        raise InvalidRequestError(f"{file} is there already; /save! {file} replaces it", param="file")
    write_text(file, form(session))


def _markdown(session: ChatSession) -> str:
    parts = [f"**System**\n\n{session.system}"] if session.system else []
    for exchange in session.exchanges:
        links = [
            f"{'!' if isinstance(one, Image) else ''}[{one.name}]({one.source!s})\n\n"
            for one in exchange.attached
        ]
        parts += [f"**You**\n\n{''.join(links)}{exchange.text}"]
        parts += [f"**{exchange.reply.model}**\n\n{exchange.reply.text.strip()}"]
    return "\n\n".join(parts) + "\n"


def _json(session: ChatSession) -> str:
    turns: list[dict[str, Any]] = [{"role": "system", "content": session.system}] if session.system else []
    for exchange in session.exchanges:
        attached: dict[str, list[str]] = {}
        for one in exchange.attached:
            attached.setdefault(_KEYS[type(one)], []).append(str(one.source))
        answer = exchange.reply.record()
        content = {"role": "assistant", "content": answer.pop("text").strip()}
        turns += [{"role": "user", "content": exchange.text, **attached}, {**content, **answer}]
    return json.dumps({"messages": turns}, ensure_ascii=False, indent=2) + "\n"
