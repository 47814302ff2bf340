"""Documents in conversations: which parts they are, what is read of them, and what a model is shown."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import io
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pypdf
import pytest

from pdfs import pdf, pdf_of, stream, text_ops
from stoker import Document, Runtime
from stoker.client import documents
from stoker.client.documents import MAX_READ_BYTES, DocumentReader
from stoker.client.worker.jobs import DocumentPages, ReadDocument
from stoker.client.worker.pool import Bounds, WorkerPool
from stoker.documents import pdf as module
from stoker.documents.limits import MAX_CONTEXT_CHARS, MAX_DOCUMENTS, MAX_NAME_CHARS, DocumentLimits
from stoker.documents.pdf import pages_of
from stoker.documents.turns import documents_in, has_documents
from stoker.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    StokerError,
    UnsupportedError,
    WorkLimitError,
)
from stoker.ipc.request import IMAGE_MARKER
from stoker.remote.bodies import messages_body
from stoker.settings import EngineSettings

REPORT = pdf("Rain in Bonn\nand wind", "Sun in Rome")
SHOWN = (
    '<document name="report.pdf" pages="2">\n'
    '<page number="1">\nRain in Bonn\nand wind\n</page>\n'
    '<page number="2">\nSun in Rome\n</page>\n'
    "</document>"
)


def packed(operators: bytes) -> bytes:
    """A PDF of one page, compressed."""
    return pdf(stream(zlib.compress(operators, 9), "/Filter /FlateDecode"))


# Each of its million texts takes the reader some microseconds; nothing but the bound on time ends it soon.
SLOW = packed(b"BT /F1 12 Tf " + b"(a) Tj 1 0 0 1 0 9 Tm " * 1_000_000 + b"ET")


def data_uri(data: bytes, kind: str = "application/pdf") -> str:
    """As clients send a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def file(data: bytes | str, **fields: Any) -> dict[str, Any]:
    """A part of a chat completion."""
    given = data_uri(data) if isinstance(data, bytes) else data
    return {"type": "file", "file": {"filename": "report.pdf", "file_data": given, **fields}}


def turn(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    """A conversation of one turn."""
    return [{"role": role, "content": list(parts)}]


Readers = Callable[..., DocumentReader]


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    """Makes readers with these bounds, closed behind the test."""
    made: list[DocumentReader] = []

    def make(**limits: Any) -> DocumentReader:
        made.append(DocumentReader(DocumentLimits(**limits)))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


async def shown(reader: DocumentReader, *parts: Any) -> list[str]:
    """What stands in the place of each part."""
    (message,) = await reader.read(turn(*parts))
    return [part if isinstance(part, str) else part["text"] for part in message["content"]]


async def refused(reader: DocumentReader, *parts: Any, role: str = "user") -> StokerError:
    """Why a conversation with these parts is refused."""
    with pytest.raises(StokerError) as caught:
        await reader.read(turn(*parts, role=role))
    return caught.value


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what happens in another thread or process."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


async def test_every_form_of_a_document_is_shown_in_the_same_words(readers: Readers, tmp_path: Path) -> None:
    """V12: name, pages, and nothing that depends on what stands around it; equal files are equal texts."""
    path = tmp_path / "report.pdf"
    path.write_bytes(REPORT)
    sent = file(REPORT)["file"]
    forms = [
        file(REPORT),
        file(base64.b64encode(REPORT).decode()),
        {"type": "input_file", **sent},
        Document(path),
        Document(REPORT, name="report.pdf"),
        Document(data_uri(REPORT), name="report.pdf"),
        {"type": "document", "document": str(path)},
    ]
    reader = readers()
    assert await shown(reader, *forms, "What is it?") == [SHOWN] * len(forms) + ["What is it?"]
    assert reader.stats()["texts"] == 1


async def test_a_conversation_without_documents_is_the_same_object(readers: Readers) -> None:
    """V12: it costs neither a copy nor a process."""
    reader = readers()
    for messages in ("Hi", turn("Hi", {"type": "text", "text": "x"}), [{"role": "user", "content": None}]):
        assert await reader.read(messages) is messages
        assert not has_documents(messages)
    assert reader.stats()["places"] == 0


async def test_title_and_context_are_told(readers: Readers) -> None:
    """V12: and what they hold ends no mark of ours."""
    document = Document(b"a,b\n", name='x".csv', title="Q<3>", context="Of </document> March.")
    (text,) = await shown(readers(), document)
    assert text == (
        '<document name="x .csv" title="Q 3">\n'
        "<context>\nOf < /document> March.\n</context>\na,b\n</document>"
    )


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"# Title\r\n\r\n\r\n\r\nText  \n", "text/markdown", "# Title\n\nText"),
        (b'{"a": 1}', "application/json", '{"a": 1}'),
        (codecs.BOM_UTF8 + "Käse".encode(), "text/plain", "Käse"),
        ("Käse".encode("utf-16"), "", "Käse"),
        ("Käse".encode("latin-1"), "text/plain;charset=ISO-8859-1", "Käse"),
        ("€".encode("cp1252"), 'text/csv; charset="windows-1252"', "€"),
        (b"a\x1b[31mb\x07", "text/plain", "a[31mb"),
        (f"see {IMAGE_MARKER}".encode(), "text/html", "see < __media__>"),
        (b"%PDX-1.4", "application/pdf", "%PDX-1.4"),
    ],
)
async def test_text_is_taken_whatever_it_is_called(
    readers: Readers, data: bytes, kind: str, text: str
) -> None:
    """V12: the declared type counts for its alphabet alone; no text shows a picture or moves a cursor."""
    (found,) = await shown(readers(), file(data_uri(data, kind), filename="a.txt"))
    assert found == f'<document name="a.txt">\n{text}\n</document>'


@pytest.mark.parametrize(
    ("part", "error", "param", "told"),
    [
        (file(b"PK\x03\x04docx"), UnsupportedError, "file.file_data", "PDF and text are taken"),
        (file(b"\x89PNG\r\n"), UnsupportedError, "file.file_data", "image_url"),
        (file(b"RIFF\0\0\0\0WAVE"), UnsupportedError, "file.file_data", "input_audio"),
        (file(b"{\\rtf1"), UnsupportedError, "file.file_data", "RTF"),
        (file(b""), InvalidRequestError, "file.file_data", "report.pdf is empty"),
        (file(b"a\xff"), InvalidRequestError, "file.file_data", "byte 1 is not UTF-8"),
        (file(b"a\0"), InvalidRequestError, "file.file_data", "character 1 is a zero"),
        (file("data:application/pdf;base64,@"), InvalidRequestError, "file.file_data", "is not base64"),
        (file("https://a.example/b.pdf"), InvalidRequestError, "file.file_data", "file_url"),
        (
            file("", file_url="https://a.example/b"),
            InvalidRequestError,
            "file.file_url",
            "documents are not f",
        ),
        (file("", file_url="file:///etc/passwd"), InvalidRequestError, "file.file_url", "no files are read"),
        (file("", file_url="ftp://a"), InvalidRequestError, "file.file_url", "a document is a data URI"),
        (file("", file_id="file-1"), UnsupportedError, "file.file_id", "send the file itself as file_data"),
        (file(""), InvalidRequestError, "file.file_data", "is missing"),
        ({"type": "file"}, InvalidRequestError, "file", "no object"),
        ({"type": "file", "file": "x"}, InvalidRequestError, "file", "no object"),
        ({"type": "input_file", "file_id": "f"}, UnsupportedError, "file_id", "no files are kept"),
        ({"type": "input_file"}, InvalidRequestError, "file_data", "is missing"),
        ({"type": "document"}, InvalidRequestError, "document", "is missing"),
        (
            file(b"a", title="x" * (MAX_NAME_CHARS + 1)),
            InvalidRequestError,
            "file.title",
            f"{MAX_NAME_CHARS}",
        ),
        (file(b"a", context=7), InvalidRequestError, "file.context", f"at most {MAX_CONTEXT_CHARS}"),
    ],
)
async def test_what_is_no_document_is_refused_by_name(
    readers: Readers, part: dict[str, Any], error: type[StokerError], param: str, told: str
) -> None:
    """V12, S3: each with its place, and what to do instead where there is something."""
    reader = readers()
    found = await refused(reader, "x", part)
    assert (type(found), found.param) == (error, f"messages.0.content.1.{param}")
    assert told in found.message
    assert reader.stats()["places"] == 0  # no process is started for it


async def test_documents_stand_in_turns_of_the_user(readers: Readers) -> None:
    """V12: and of tools; the assistant writes none."""
    found = await refused(readers(), file(REPORT), role="assistant")
    assert found.param == "messages.0.content.0"
    (message,) = await readers().read(turn(file(b"42", filename="a.txt"), role="tool"))
    assert "42" in message["content"][0]["text"]
    many = turn(*[file(b"a")] * (MAX_DOCUMENTS + 1))
    with pytest.raises(InvalidRequestError, match=f"{MAX_DOCUMENTS + 1} documents, at most {MAX_DOCUMENTS}"):
        documents_in(many)


async def test_a_file_that_is_not_there_is_named(readers: Readers, tmp_path: Path) -> None:
    """V12: by an application, whose own files they are."""
    found = await refused(readers(), Document(tmp_path / "no.pdf"))
    assert "no.pdf: the document cannot be read: No such file" in found.message


def encrypted(password: str, algorithm: str = "RC4-128") -> bytes:
    """The report, which needs the password."""
    writer = pypdf.PdfWriter()
    writer.append(io.BytesIO(REPORT))
    writer.encrypt(password, "owner", algorithm=algorithm)
    target = io.BytesIO()
    writer.write(target)
    return target.getvalue()


def test_a_pdf_that_needs_no_password_is_read() -> None:
    """V12: as every viewer does; one that needs one says so."""
    assert pages_of(encrypted(""), "a.pdf", "p", 9, 999) == ["Rain in Bonn\nand wind", "Sun in Rome"]
    with pytest.raises(InvalidRequestError, match=r"a\.pdf is encrypted and needs a password"):
        pages_of(encrypted("secret"), "a.pdf", "p", 9, 999)


def test_an_encryption_that_is_not_read_here_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """V12: it needs a package that is not installed; the message names it."""
    from pypdf.errors import DependencyError  # noqa: PLC0415 - as where it is caught

    def refuse(*_: object) -> None:
        raise DependencyError("cryptography is required for AES")

    data = encrypted("")
    monkeypatch.setattr(pypdf.PdfReader, "decrypt", refuse)
    with pytest.raises(UnsupportedError, match=r"a\.pdf is encrypted .*AES; save it without"):
        pages_of(data, "a.pdf", "p", 9, 999)


LOOP = pdf_of(
    [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [2 0 R] >>",
    ]
)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"%PDF-1.4\n", r"a\.pdf cannot be read: "),
        (REPORT[:300], r"a\.pdf cannot be read: |has no text|1 to 5 are taken"),
        (b"%PDF-1.7" + bytes(range(256)) * 9, r"a\.pdf cannot be read: "),
        (LOOP, r"a\.pdf"),
        (pdf(), r"a\.pdf has 0 pages, 1 to 5 are taken"),
        (pdf("", " "), r"a\.pdf has no text on 2 pages, perhaps it is a scan: send its pages as pictures"),
        (pdf(*["a"] * 6), r"a\.pdf has 6 pages, 1 to 5 are taken"),
        (pdf("a", "b" * 99), r"a\.pdf has 100 characters on the first 2 of 2 pages, at most 50 are taken"),
        (pdf(stream(b"x", "/Filter /FlateDecode /DecodeParms [1 2 3]")), r"a\.pdf"),
    ],
)
def test_a_pdf_that_cannot_be_read_says_why(data: bytes, told: str) -> None:
    """V12: damaged, without text, over a bound: the file and its pages are named."""
    with pytest.raises(InvalidRequestError, match=told) as caught:
        pages_of(data, "a.pdf", "p", 5, 50)
    assert caught.value.param == "p"


def pages_in_a_list(number: int) -> bytes:
    """A PDF whose list of pages has that many entries, all the same page."""
    kids = b"<< /Type /Pages /Count %d /Kids [%b] >>" % (number, b"3 0 R " * number)
    return pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", kids, b"<< /Type /Page /Parent 2 0 R >>"])


@pytest.mark.parametrize(
    ("bound", "data", "what"),
    [
        ("MAX_UNPACKED_BYTES", packed(b" " * (3 * 2**20)), "page 1 of 1"),
        ("MAX_PAGE_TOKENS", packed(b"BT " + b"(a) Tj " * 2000 + b"ET"), "page 1 of 1"),
        ("MAX_ENTRIES", pages_in_a_list(2001), "its pages"),
    ],
)
def test_more_work_than_is_taken_is_told_with_our_bounds(
    monkeypatch: pytest.MonkeyPatch, bound: str, data: bytes, what: str
) -> None:
    """V12: not as damage, and not in the words of the library that reads it."""
    monkeypatch.setattr(module, bound, 2 * 2**20 if "BYTES" in bound else 2000)
    with pytest.raises(WorkLimitError) as caught:
        pages_of(data, "a.pdf", "p", 5000, 5000)
    assert caught.value.message.startswith(f"a.pdf: {what} cannot be read: it takes more than ")
    assert ("2 MiB unpacked" if "BYTES" in bound else "2000 ") in caught.value.message
    assert caught.value.param == "p"
    assert getattr(module, bound) in caught.value.details.values()


def test_any_part_of_a_pdf_may_be_missing() -> None:
    """V12: wherever it is cut, the error is ours, or what is left is read."""
    for end in range(0, len(REPORT), 7):
        with contextlib.suppress(InvalidRequestError):
            pages = pages_of(REPORT[:end] + b" ", "a.pdf", "p", 5, 500)
            assert set(pages) <= {"Rain in Bonn\nand wind", "Sun in Rome", ""}


async def test_all_documents_of_a_request_are_bounded_together(readers: Readers) -> None:
    """V12: characters of texts and PDFs alike."""
    reader = readers(max_chars=30)
    text = file(b"1234567890", filename="a.txt")
    found = await refused(reader, text, text, text, text)
    assert "the documents have 40 characters, 30 are taken in one request" in found.message
    found = await refused(reader, text, file(REPORT))
    assert "characters on the first" in found.message
    assert "at most 20 are taken" in found.message
    found = await refused(readers(max_bytes=9), text)
    assert "10 bytes" in found.message
    assert "at most 9" in found.message
    assert "over 9 bytes" in (await refused(readers(max_bytes=9), Document(b"1234567890"))).message


async def test_what_unpacks_to_more_than_is_taken_is_refused(readers: Readers) -> None:
    """V12: a hundred thousand bytes that become 100 MB; only the process that reads them notices."""
    data = packed(b"0 0 Td " * 15_000_000)
    assert len(data) < 200_000
    found = await refused(readers(), file(data))
    assert isinstance(found, WorkLimitError)
    assert "report.pdf" in found.message
    assert "more than 64 MiB unpacked" in found.message or "more than 384 MiB of memory" in found.message


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only there an address space is bounded")
def test_a_document_that_takes_too_much_memory_is_ended() -> None:
    """V12: by the bound on its process; the message has the number and the next one is read."""
    pool = WorkerPool(Bounds(limit_s=60.0, max_bytes=64 * 2**20))
    try:
        job = ReadDocument(name="b.pdf", param="p", data=SLOW, max_pages=9, max_chars=99)
        with pytest.raises(
            WorkLimitError, match=r"reading b\.pdf needs more than 64 MiB of memory"
        ) as caught:
            pool.submit(job, DocumentPages).result()
        assert caught.value.details == {"limit_bytes": 64 * 2**20}
        good = ReadDocument(name="a.pdf", param="p", data=REPORT, max_pages=9, max_chars=99)
        assert pool.submit(good, DocumentPages).result().pages[1] == "Sun in Rome"
    finally:
        pool.close()


async def test_a_document_that_takes_too_long_is_ended_and_another_is_read_meanwhile(
    readers: Readers,
) -> None:
    """V12: it costs its own request an error that names the limit, and others nothing."""
    reader = readers(max_s=2)
    slow = asyncio.ensure_future(refused(reader, file(SLOW)))
    await until(lambda: reader.stats()["running"] == 1)
    assert await shown(reader, file(REPORT)) == [SHOWN]
    assert not slow.done()
    found = await slow
    assert isinstance(found, WorkLimitError)
    assert (
        "reading report.pdf did not end within 2 s and was stopped; send fewer of its pages" in found.message
    )
    assert found.details == {"limit_s": 2}


async def test_a_caller_that_leaves_ends_the_reading(readers: Readers) -> None:
    """V12: its process is gone, its place is free, and the next document finds another."""
    reader = readers(max_s=600)
    reading = asyncio.ensure_future(reader.read(turn(file(SLOW))))
    await until(lambda: reader.stats()["running"] == 1 and bool(reader._pool.pids()))
    child = psutil.Process(reader._pool.pids()[0])
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.to_thread(child.wait, 60)
    await until(lambda: reader.stats()["running"] == 0)
    assert await shown(reader, file(REPORT)) == [SHOWN]


async def test_what_is_stopped_is_not_begun_again() -> None:
    """V12: a lost process is no reason to try once more where nobody waits; a job in the queue leaves it."""
    pool = WorkerPool(Bounds(limit_s=600.0, num_places=1))
    try:
        job = ReadDocument(name="a.pdf", param="p", data=SLOW, max_pages=9, max_chars=10**9)
        begun, waiting = pool.submit(job, DocumentPages), pool.submit(job, DocumentPages)
        await until(lambda: begun.running() and bool(pool.pids()))
        pool.stop(waiting)
        assert waiting.cancelled()
        pool.stop(begun)
        with pytest.raises(RequestCancelledError, match="nobody waits for it"):
            await asyncio.to_thread(begun.result, 60)
        await until(lambda: pool.stats() == {"places": 1, "running": 0, "waiting": 0})
        pool.stop(begun)  # nothing is left of it
    finally:
        pool.close()


async def test_a_document_is_read_once(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """V12: the next turn of its conversation finds its text; another caller reads it for himself."""
    reader = readers()
    submitted: list[str] = []
    submit = reader._pool.submit

    def counted(job: Any, answer: Any, *, group: str) -> Any:
        submitted.append(group)
        return submit(job, answer, group=group)

    monkeypatch.setattr(reader._pool, "submit", counted)
    for owner in ("one", "one", "two", "one", "two"):
        await reader.read(turn(file(REPORT)), owner)
    assert submitted == ["one", "two"]
    reader.release()
    assert reader.stats()["texts"] == 0
    await reader.read(turn(file(REPORT)), "one")
    assert submitted == ["one", "two", "one"]
    monkeypatch.setattr(documents, "MAX_KEPT_CHARS", 50)
    await reader.read(turn(file(pdf("another text of some length"))), "one")
    assert reader.stats()["texts"] == 1  # the older one has made room
    await reader.read(turn(file(pdf("x" * 60))), "one")
    assert reader.stats()["texts"] == 1  # too long to be kept


async def test_one_callers_documents_leave_places_for_others(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V12: however many it sends; more than may wait are refused, and may be sent again later."""
    monkeypatch.setattr(documents, "MAX_WAITING", 1)
    reader = readers(max_s=600)
    held = []
    for figures in ((1, 0), (2, 0), (2, 1)):
        held.append(asyncio.ensure_future(reader.read(turn(file(SLOW)), "one")))
        await until(lambda wanted=figures: (reader.stats()["running"], reader.stats()["waiting"]) == wanted)
    with pytest.raises(QueueFullError):
        await reader.read(turn(file(REPORT)), "one")
    (message,) = await reader.read(turn(file(REPORT)), "two")
    assert message["content"][0]["text"] == SHOWN
    for one in held:
        one.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_after_close_nothing_is_read(readers: Readers) -> None:
    """V12: a typed error that says why."""
    reader = readers()
    reader.close()
    assert (await refused(reader, file(REPORT))).code == "not_ready"


def test_the_settings_are_the_bounds() -> None:
    """V12: where files may come from is what is said of images."""
    settings = EngineSettings(
        max_document_bytes=2000,
        max_document_pages=3,
        max_document_chars=4,
        max_document_seconds=5,
        image_roots=("/a",),
        allow_http_images=True,
    )
    wanted = DocumentLimits(
        max_bytes=2000, max_pages=3, max_chars=4, max_s=5, roots=(Path("/a"),), can_fetch=True
    )
    assert DocumentLimits.of(settings) == wanted
    assert MAX_READ_BYTES == 384 * 2**20


def test_a_file_below_an_allowed_folder_is_read(tmp_path: Path) -> None:
    """V12: as images are."""
    (tmp_path / "a.txt").write_text("42")
    reader = DocumentReader(DocumentLimits(roots=(tmp_path,)))
    try:
        part = {"type": "input_file", "file_url": f"file://{tmp_path}/a.txt"}
        (message,) = reader.read_now(turn(part))
        assert "42" in message["content"][0]["text"]
    finally:
        reader.close()


async def test_the_library_takes_documents() -> None:
    """V12: beside texts, blocking or not; equal documents are equal prompts."""
    asked = turn(Document(REPORT, name="report.pdf"), "What is it?")
    others = set(threading.enumerate())
    async with Runtime("fake:eog_period=0", isolation="thread") as runtime:
        plan = await runtime.prepare_chat(asked)
        assert f"{SHOWN}\nWhat is it?" in plan.prompt
        assert runtime.plan_chat(asked).prompt == plan.prompt
        assert (await runtime.ask(asked, max_tokens=4)).usage.completion_tokens == 4
        again = await runtime.ask(asked, max_tokens=4)
        assert again.usage.cached_tokens > again.usage.prompt_tokens / 2
    workers = [one for one in set(threading.enumerate()) - others if one.name == "stoker-worker"]
    for worker in workers:
        worker.join(30)
    assert not [worker for worker in workers if worker.is_alive()]


def test_a_document_travels_to_a_server(tmp_path: Path) -> None:
    """V12, W2: as OpenAI's part, title and context included."""
    path = tmp_path / "a.txt"
    path.write_text("42")
    own = Document(path, title="T", context="C")
    (message,) = messages_body(turn(own, {"type": "document", "document": path}))
    first, second = message["content"]
    data = {"filename": "a.txt", "file_data": data_uri(b"42", "application/octet-stream")}
    assert first == {"type": "file", "file": {**data, "title": "T", "context": "C"}}
    assert second == {"type": "file", "file": data}
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        messages_body(turn(Document(tmp_path / "no.pdf")))


def test_text_ops_of_a_made_page_are_what_a_reader_reads() -> None:
    """The files of these tests are PDFs, not what merely looks like one."""
    assert pages_of(packed(text_ops("packed")), "a.pdf", "p", 1, 99) == ["packed"]
