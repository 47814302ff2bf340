"""PDFs made byte by byte: what a test says of one is all that there is in it."""

from __future__ import annotations

from collections.abc import Sequence

HELVETICA = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def text_ops(text: str) -> bytes:
    """The operators that show a text, a line below the other."""
    lines = " ".join(f"({line}) Tj T*" for line in text.split("\n"))
    return f"BT /F1 12 Tf 72 720 Td 14 TL {lines} ET".encode("latin-1")


def stream(data: bytes, entries: str = "") -> bytes:
    """A stream object."""
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(data), entries.encode(), data)


def pdf_of(objects: Sequence[bytes], trailer: str = "") -> bytes:
    """The file of these objects, numbered from 1; the first is the catalogue."""
    parts, offsets, at = [b"%PDF-1.4\n"], [], 9
    for number, body in enumerate(objects, 1):
        offsets.append(at)
        parts.append(b"%d 0 obj\n%b\nendobj\n" % (number, body))
        at += len(parts[-1])
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    num = len(objects) + 1
    head = f"trailer << /Size {num} /Root 1 0 R {trailer} >>\nstartxref\n{at}\n%%EOF\n".encode()
    return b"".join([*parts, b"xref\n0 %d\n0000000000 65535 f \n" % num, table, head])


def pdf(*pages: str | bytes) -> bytes:
    """A PDF with a page for each text, or for each finished stream object."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
        HELVETICA,
    ]
    for index, page in enumerate(pages):
        own = f"/Contents {5 + 2 * index} 0 R /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {own} >>".encode())
        objects.append(stream(text_ops(page)) if isinstance(page, str) else page)
    return pdf_of(objects)
