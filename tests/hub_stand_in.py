"""A small model hub on loopback: the listing and the file addresses as the real one serves them."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

COMMIT = "c0ffee00" * 5


@dataclass
class HubStandIn:
    """Serves `files` as the repository `repo`; misbehaves as told.

    Attributes:
        announced: sha256 to announce instead of the true one, by file name.
        plain: names of files outside large-file storage, listed with their git hash only.
        short_by: bytes to announce too few, by file name.
        cut_after: bytes after which the connection is dropped, once for each entry, by file name.
        failures: statuses to answer file requests with before behaving.
        listing_failures: the same for the listing.
        knows_ranges: whether a Range header is honoured.
        error_code: `X-Error-Code` of a refused listing, with `error_status`.
        requests: (method, path, Range header) of everything asked.
        bytes_served: body bytes of files sent.
    """

    repo: str = "acme/tiny-GGUF"
    files: dict[str, bytes] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    short_by: dict[str, int] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    listing_failures: list[int] = field(default_factory=list)
    knows_ranges: bool = True
    error_code: str | None = None
    error_status: int = 404
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    bytes_served: int = 0

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """The address to put in place of the real hub's."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def listing(self) -> dict[str, object]:
        """The body of `/api/models/REPO/revision/main?blobs=true`."""
        return {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "private": False,
            "tags": ["gguf"],
            "siblings": [self._sibling(name, data) for name, data in self.files.items()],
        }

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's own identity
        size = len(data) - self.short_by.get(name, 0)
        sibling: dict[str, object] = {"rfilename": name, "size": size, "blobId": git}
        if name not in self.plain:
            sibling["lfs"] = {"sha256": self.hash_of(name), "size": size, "pointerSize": 130}
        return sibling

    def hash_of(self, name: str) -> str:
        """The sha256 it announces for a file."""
        return self.announced.get(name, hashlib.sha256(self.files[name]).hexdigest())

    def file_requests(self) -> list[str | None]:
        """The Range header of each GET of a file, in order."""
        return [asked for method, path, asked in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Headers of a file."""
        self._answer()

    def do_GET(self) -> None:
        """The listing or a file."""
        self._answer()

    def _answer(self) -> None:
        hub = self.stand_in
        path = self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if path in {f"/api/models/{hub.repo}/revision/main", f"/api/models/{hub.repo}"}:
            self._answer_listing()
        elif path.startswith(f"/{hub.repo}/resolve/"):
            self._answer_file(path.removeprefix(f"/{hub.repo}/resolve/").partition("/")[2])
        else:
            self._refuse(404, "RepoNotFound")

    def _answer_listing(self) -> None:
        hub = self.stand_in
        if hub.error_code:
            self._refuse(hub.error_status, hub.error_code)
        elif hub.listing_failures:
            self._refuse(hub.listing_failures.pop(0), None)
        else:
            body = json.dumps(hub.listing()).encode()
            self._send(200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body)

    def _answer_file(self, name: str) -> None:
        hub = self.stand_in
        if hub.failures and self.command == "GET":
            self._refuse(hub.failures.pop(0), None)
            return
        if name not in hub.files:
            self._refuse(404, "EntryNotFound")
            return
        data, status, start = hub.files[name], 200, 0
        headers = {
            "ETag": f'"{hub.hash_of(name)}"',
            "X-Linked-Etag": f'"{hub.hash_of(name)}"',
            "X-Linked-Size": str(len(data)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range")
        if asked and hub.knows_ranges:
            start, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        headers["Content-Length"] = str(len(data) - start)
        self._send(status, headers, data[start : self._cut(name, start, len(data))])

    def _cut(self, name: str, start: int, end: int) -> int:
        cuts = self.stand_in.cut_after.get(name)
        if not cuts or self.command == "HEAD":
            return end
        self.close_connection = True
        return min(start + cuts.pop(0), end)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            if "X-Repo-Commit" in headers:
                self.stand_in.bytes_served += len(body)

    def _refuse(self, status: int, code: str | None) -> None:
        headers = {"Content-Length": "0"} | ({"X-Error-Code": code} if code else {})
        self._send(status, headers, b"")
