"""Documents in the turns of a conversation: which there are, and the text that stands in their place.

Owns the forms that a part may have and what a model is shown: the same text for the same document, whatever
stands around it, so that what was computed of it is found again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chat.turns import DOCUMENT_PARTS
from stoker.documents.document import DEFAULT_NAME, Document
from stoker.documents.limits import MAX_CONTEXT_CHARS, MAX_DOCUMENTS, MAX_NAME_CHARS
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import IMAGE_MARKER

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's form; a text is one turn, the user's, and has no documents."""

_KINDS = DOCUMENT_PARTS
_UNSAFE = re.compile(r'[\x00-\x1f\x7f"<>]+')
_BROKEN_MARKER = IMAGE_MARKER.replace("<", "< ")
_END = "</document>"
_BROKEN_END = "< /document>"


@dataclass(frozen=True, slots=True)
class GivenDocument:
    """A document that a conversation holds.

    Attributes:
        where: its part.
        param: path of its content in the request, for errors.
        source: an application's Document, or a stranger's URI.
        name: of the file.
        title, context: as the model is told; empty: it is not.
    """

    where: str
    param: str
    source: Document | str
    name: str
    title: str = ""
    context: str = ""

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.param}: {self.name}"

    def shown(self, pages: Sequence[str] | str) -> str:
        """What the model is shown of it.

        Args:
            pages: the text of each page, or of all where there are no pages.
        """
        about = f' title="{self.title}"' if self.title else ""
        lines = [f"<context>\n{_harmless(self.context)}\n</context>"] if self.context else []
        if isinstance(pages, str):
            lines.append(_harmless(pages))
        else:
            about += f' pages="{len(pages)}"'
            lines += [
                f'<page number="{number}">\n{_harmless(page)}\n</page>'
                for number, page in enumerate(pages, 1)
            ]
        body = "\n".join(lines)
        return f'<document name="{self.name}"{about}>\n{body}\n{_END}'


def has_documents(messages: object) -> bool:
    """Whether a conversation holds documents; what is malformed otherwise is said by others."""
    return any(True for _ in _parts(messages))


def documents_in(messages: Messages) -> list[GivenDocument]:
    """The documents of a conversation, in their order.

    Raises:
        InvalidRequestError: a part is malformed, in a turn of the assistant, or there are too many.
        UnsupportedError: it names a file that would have to be kept here.
    """
    found = []
    for where, part, role in _parts(messages):
        if role == "assistant":
            text = f"{where}: documents stand in user turns, not in {role}'s"
            raise InvalidRequestError(text, param=where)
        found.append(_given(part, where))
    if len(found) > MAX_DOCUMENTS:
        text = f"there are {len(found)} documents, at most {MAX_DOCUMENTS} are taken"
        raise InvalidRequestError(text, param="messages")
    return found


def with_texts(messages: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The conversation with a text in place of each document, by the place of its part."""
    places = {where for where, _, _ in _parts(messages)}
    turns = [dict(message) for message in messages]
    for index, turn in enumerate(turns):
        content = turn.get("content")
        if isinstance(content, list | tuple):
            turn["content"] = [
                {"type": "text", "text": texts.get(where, "")} if where in places else part
                for where, part in _placed(index, content)
            ]
    return turns


def _placed(index: int, content: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"messages.{index}.content.{number}", part) for number, part in enumerate(content))


def _parts(messages: object) -> Iterator[tuple[str, Document | Mapping[str, Any], object]]:
    """(place, part, role) of each document."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            continue
        for where, part in _placed(index, content):
            is_one = isinstance(part, Mapping) and part.get("type") in _KINDS
            if is_one or isinstance(part, Document):
                yield where, part, message.get("role")


def _given(part: Document | Mapping[str, Any], where: str) -> GivenDocument:
    if isinstance(part, Document):
        return _own(part, where)
    kind = part["type"]
    if kind == "input_file":
        return _sent(part, where)
    if kind == "file":
        return _sent(part.get("file"), f"{where}.file", where)
    given = part.get("document")
    if given is None:
        raise InvalidRequestError(f"{where}.document is missing", param=f"{where}.document")
    return _own(given if isinstance(given, Document) else Document(given), where)


def _own(document: Document, where: str) -> GivenDocument:
    """An application's document."""
    title, context = _about({"title": document.title, "context": document.context}, where)
    return GivenDocument(where, where, document, _named(document.name), title, context)


def _sent(fields: Any, prefix: str, where: str = "") -> GivenDocument:
    """A stranger's document: `file_data`, or the address `file_url`.

    Raises:
        InvalidRequestError: there is none of them.
        UnsupportedError: it is the id of a file.
    """
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f"{prefix} is no object with file_data", param=prefix)
    data, url = fields.get("file_data"), fields.get("file_url")
    title, context = _about(fields, prefix)
    about = (_named(fields.get("filename") or title), title, context)
    if isinstance(data, str) and data:
        param = f"{prefix}.file_data"
        if data[:5].lower() == "data:":
            return GivenDocument(where or prefix, param, data, *about)
        if ":" in data[:8]:
            text = f"{param} is base64 or a data URI; an address stands in file_url"
            raise InvalidRequestError(text, param=param)
        return GivenDocument(where or prefix, param, f"data:;base64,{data}", *about)
    if isinstance(url, str) and url:
        return GivenDocument(where or prefix, f"{prefix}.file_url", url, *about)
    if fields.get("file_id"):
        param = f"{prefix}.file_id"
        text = f"{param}: no files are kept here; send the file itself as file_data, in base64"
        raise UnsupportedError(text, param=param)
    raise InvalidRequestError(
        f"{prefix}.file_data is missing: the file in base64", param=f"{prefix}.file_data"
    )


def _about(fields: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    """Title and context. Raises InvalidRequestError where one is no text or too long."""
    told = []
    for name, most in (("title", MAX_NAME_CHARS), ("context", MAX_CONTEXT_CHARS)):
        value = fields.get(name) or ""
        if not isinstance(value, str) or len(value) > most:
            text = f"{prefix}.{name} is a text of at most {most} characters"
            raise InvalidRequestError(text, param=f"{prefix}.{name}")
        told.append(value)
    return _UNSAFE.sub(" ", told[0]).strip(), told[1]


def _named(name: Any) -> str:
    """A file's name as it can stand within quotes; the end of it counts, as it tells what the file is."""
    found = _UNSAFE.sub(" ", name).strip()[-MAX_NAME_CHARS:] if isinstance(name, str) else ""
    return found or DEFAULT_NAME


def _harmless(text: str) -> str:
    """The text without what would end the document or show a picture that is not there."""
    return text.replace(IMAGE_MARKER, _BROKEN_MARKER).replace(_END, _BROKEN_END)
