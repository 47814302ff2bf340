"""Whether a file is a PDF or text, by its content; a caller's word counts for the alphabet of a text alone.

Owns what is refused by name, and the text of what is text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

from stoker.errors import InvalidRequestError, UnsupportedError

TAKEN = "PDF and text are"

_PDF, _PDF_WITHIN = b"%PDF-", 1024  # readers take a PDF whose head is not the first of the file
_ZIP = "an archive, or a document of an office program: save it as PDF or text;"
_PICTURE = "a picture: send it as one (image_url);"
_SOUND = "a recording: send it as one (input_audio);"
_FOREIGN: Mapping[bytes, str] = {
    b"PK\x03\x04": _ZIP,
    b"\xd0\xcf\x11\xe0": _ZIP,
    b"{\\rtf": "a document in RTF: save it as PDF or text;",
    b"\x89PNG": _PICTURE,
    b"\xff\xd8\xff": _PICTURE,
    b"GIF8": _PICTURE,
    b"fLaC": _SOUND,
    b"OggS": _SOUND,
    b"ID3": _SOUND,
    b"\x1f\x8b": "a compressed file;",
}
_RIFF = {b"WAVE": _SOUND, b"WEBP": _PICTURE}
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CHARSET = re.compile(r"charset=\"?([a-z0-9_-]{1,20})", re.IGNORECASE)
_CHARSETS = {"iso-8859-1": "latin-1", "latin-1": "latin-1", "latin1": "latin-1", "windows-1252": "cp1252"}
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))
_BLANK_LINES = re.compile(r"\n{3,}")
_LINE_ENDS = re.compile(r"[ \t]+(?=\n)")


def is_pdf(data: bytes, label: str, param: str) -> bool:
    """Whether the file is a PDF; else it may be text.

    Args:
        data: of the file, or its beginning.
        label: names the document in errors.
        param: its place in the request.

    Raises:
        InvalidRequestError: it is empty.
        UnsupportedError: it is a file of another kind.
    """
    if not data:
        raise InvalidRequestError(f"{label} is empty", param=param)
    if _PDF in data[:_PDF_WITHIN]:
        return True
    name = next((name for start, name in _FOREIGN.items() if data.startswith(start)), None)
    if name is None and data[:4] == b"RIFF":
        name = _RIFF.get(data[8:12])
    if name is not None:
        raise UnsupportedError(f"{label} is {name} {TAKEN} taken", param=param)
    return False


def text_of(data: bytes, declared: str, label: str, param: str) -> str:
    """The text that the bytes are: UTF-8, UTF-16 with its mark, or the declared one of the Latin alphabets.

    Raises:
        InvalidRequestError: they are no text.
    """
    found = _CHARSET.search(declared)
    encoding = next((name for mark, name in _BOMS.items() if data.startswith(mark)), None)
    encoding = encoding or (_CHARSETS.get(found[1].lower(), "utf-8") if found else "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not {encoding.upper()}"
        raise InvalidRequestError(f"{label} is neither a PDF nor text: {why}", param=param) from None
    if (at := text.find("\0")) >= 0:
        raise InvalidRequestError(f"{label} is neither a PDF nor text: character {at} is a zero", param=param)
    return cleaned(text)


def cleaned(text: str) -> str:
    """The text with line breaks of one kind, without what commands a terminal or ends no line.

    Halves of a character that are alone become U+FFFD: they could not be encoded.
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    lines = whole.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    return _BLANK_LINES.sub("\n\n", _LINE_ENDS.sub("", lines)).strip("\n")
