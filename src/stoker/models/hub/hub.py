"""Gets models from a hub into the models folder: whole, verified, or not at all (SPEC L7).

The protocol (addresses, tokens, redirects, errors) is huggingface_hub's. Owned here is what it does not
give: a partial file that a later run continues, sizes and hashes that are always compared, back-off, and
final files that are plain files renamed into place. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean
what they mean there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

from stoker.errors import (
    DownloadError,
    InvalidRequestError,
    MachineSetupError,
    ModelNotFoundError,
)
from stoker.models.hub.downloads import FOLDER_CONFIG, HubReference, check_file_name

if TYPE_CHECKING:
    from pathlib import Path

    from huggingface_hub.hf_api import ModelInfo, RepoSibling

Progress = Callable[[int, int, str], None]
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_LONGEST_WAIT_S = 30.0
_PERMANENT_STATUS = frozenset({400, 401, 403, 404, 405, 410, 416, 451})
_HTTP_PARTIAL = 206
_METADATA_ATTEMPTS = 3
# The HTTP client's own error class is a base of the hub's; which client that is differs between its releases.
_CLIENT_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What to get and where to.

    Attributes:
        reference: `OWNER/REPO`, `OWNER/REPO:FILE`, `OWNER/REPO:QUANT` or `OWNER/REPO:safetensors`.
        models_dir: the file comes to lie in `models_dir/OWNER/REPO/`.
        revision: branch, tag or commit.
        endpoint: address of the hub; None: the one huggingface_hub is set to.
        attempts: tries for each file in which no byte arrives before giving up.
        backoff_s: seconds before the second try; doubles with each further one.
    """

    reference: str
    models_dir: Path
    revision: str = "main"
    endpoint: str | None = None
    attempts: int = 5
    backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file of the hub; `sha256`, or else git's identity of the bytes, is what it has to be."""

    name: str
    url: str
    size_bytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def tag(self) -> str:
        return (self.sha256 or self.git_sha1 or "unknown")[:12]


class _DamagedError(DownloadError):
    """What arrived has another hash."""


def pull(request: PullRequest, on_progress: Progress) -> Path:
    """Download what the reference means, all shards of it; what is already there and intact is kept.

    Args:
        request: what and where to.
        on_progress: called with (bytes of the file here, bytes it has, its name), on the caller's thread.

    Returns:
        The (first) GGUF file, or the folder of a model that is one.

    Raises:
        InvalidRequestError: the reference makes no sense.
        ModelNotFoundError: no such repository, revision or file, or no access to it; says what to do.
        DownloadError: no network, the hub failed too often, or what came was not what it announced.
        MachineSetupError: the folder cannot be written or the disk is too full.
    """
    reference = HubReference.parse(request.reference)
    folder = request.models_dir.joinpath(*reference.repo.split("/"))
    files = _remote_files(request, reference)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(files, folder)
        paths = [_fetch(request, file, folder.joinpath(*file.name.split("/")), on_progress) for file in files]
    except OSError as error:
        raise MachineSetupError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder if paths[-1].name == FOLDER_CONFIG else paths[0]


def _remote_files(request: PullRequest, reference: HubReference) -> list[_RemoteFile]:
    brief = replace(request, attempts=min(request.attempts, _METADATA_ATTEMPTS))
    info = _with_retries(brief, reference.repo, lambda: _repo_info(request, reference.repo))
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    names = reference.choose(list(siblings))
    return [_remote_file(request, info, siblings[name]) for name in names]


def _repo_info(request: PullRequest, repo: str) -> ModelInfo:
    api = HfApi(endpoint=request.endpoint)
    try:
        return api.model_info(repo, revision=request.revision, files_metadata=True, timeout=_TIMEOUT_S)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, OSError):  # a status of the hub, which is for the caller to judge
            raise
        raise DownloadError(f"{repo}: {api.endpoint} answers with something that is no listing") from error


def _remote_file(request: PullRequest, info: ModelInfo, sibling: RepoSibling) -> _RemoteFile:
    name = sibling.rfilename
    try:
        check_file_name(name)
    except InvalidRequestError as error:
        raise DownloadError(f"{info.id}: the hub names the file {name[:200]!r}, which is refused") from error
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    size_bytes = sibling.lfs.size if sibling.lfs else sibling.size
    if size_bytes is None or not (sha256 or sibling.blob_id):
        raise DownloadError(
            f"{info.id}: the hub tells neither size nor hash of {name}, it cannot be verified"
        )
    # The commit, not the branch: a push in the middle must not mix two versions.
    url = hf_hub_url(info.id, name, revision=info.sha or request.revision, endpoint=request.endpoint)
    return _RemoteFile(name, url, size_bytes, sha256, sibling.blob_id)


def _check_room(files: list[_RemoteFile], folder: Path) -> None:
    needed = sum(file.size_bytes for file in files if not folder.joinpath(*file.name.split("/")).exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineSetupError(
            f"{folder} has {free} bytes free, the model needs {needed}", needed=needed, free=free
        )


def _fetch(request: PullRequest, file: _RemoteFile, path: Path, on_progress: Progress) -> Path:
    """One file, and once more where what arrived is not what was announced."""
    try:
        return _fetch_once(request, file, path, on_progress)
    except _DamagedError as error:
        _log.warning("%s It is fetched again.", error)
        return _fetch_once(request, file, path, on_progress)


def _fetch_once(request: PullRequest, file: _RemoteFile, path: Path, on_progress: Progress) -> Path:
    if path.is_file() and _is_intact(file, path):
        on_progress(file.size_bytes, file.size_bytes, file.name)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # The hash in the name keeps a partial file from being continued with another version's bytes.
    partial = path.with_name(f"{path.name}.{file.tag}.incomplete")
    with partial.open("ab") as output:
        _lock(output, partial)
        _with_retries(request, file.name, lambda: _continue(file, output, on_progress), output.tell)
        output.flush()
        os.fsync(output.fileno())
        if not _is_intact(file, partial):
            partial.unlink()
            raise _DamagedError(
                f"{file.name}: what arrived is not what the hub announced"
                f" ({file.size_bytes} bytes, hash {file.tag}...); it was removed, pull again"
            )
        partial.replace(path)
    return path


def _lock(output: BinaryIO, partial: Path) -> None:
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DownloadError(f"{partial} is being written by another pull; wait for it") from error


def _continue(file: _RemoteFile, output: BinaryIO, on_progress: Progress) -> None:
    """Append what is missing of the file, as one request."""
    done = output.seek(0, os.SEEK_END)
    if done > file.size_bytes:
        done = _emptied(output)
    on_progress(done, file.size_bytes, file.name)
    if done == file.size_bytes:
        return
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with get_session().stream("GET", file.url, headers=headers, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if done and response.status_code != _HTTP_PARTIAL:  # the server does not know ranges: from the start
            done = _emptied(output)
        for chunk in response.iter_bytes():  # no chunk size: what arrived before a break is not held back
            done += len(chunk)
            if done > file.size_bytes:
                _emptied(output)
                raise DownloadError(
                    f"{file.name}: the hub sends more than the {file.size_bytes} bytes it announced"
                )
            output.write(chunk)
            on_progress(done, file.size_bytes, file.name)
    if done < file.size_bytes:
        raise ConnectionResetError(f"{file.name}: the connection ended at byte {done} of {file.size_bytes}")


def _with_retries(
    request: PullRequest, what: str, operation: Callable[[], _Result], reached: Callable[[], int] = int
) -> _Result:
    """Run `operation` until it succeeds; a try that moved `reached` on starts the count anew."""
    tries, last = 0, reached()
    while True:
        try:
            return operation()
        except (_CLIENT_ERROR, ConnectionError) as error:
            _raise_permanent(error, what)
            tries = 1 if reached() > last else tries + 1
            last = reached()
            if tries >= request.attempts:
                raise DownloadError(_unreachable(request, what, error)) from error
            wait_s = min(request.backoff_s * 2 ** (tries - 1), _LONGEST_WAIT_S)
            _log.info("%s: %s; next try in %.1f s", what, error, wait_s)
            time.sleep(wait_s)


def _raise_permanent(error: BaseException, what: str) -> None:
    match error:
        case OfflineModeIsEnabled():
            raise DownloadError(f"{what}: the hub is switched off (HF_HUB_OFFLINE is set)") from error
        case GatedRepoError():
            raise DownloadError(f"{what} is gated: accept its terms on the hub, then set HF_TOKEN") from error
        case RepositoryNotFoundError():
            raise ModelNotFoundError(
                f"the hub has no repository {what}, or it is private: check the name, or set HF_TOKEN"
            ) from error
        case RevisionNotFoundError() | EntryNotFoundError():
            raise ModelNotFoundError(f"{what}: the hub has no such revision or file") from error
        case HfHubHTTPError() if error.response.status_code in _PERMANENT_STATUS:
            raise DownloadError(
                f"{what}: the hub refused with status {error.response.status_code}"
            ) from error
        case _:
            return


def _unreachable(request: PullRequest, what: str, error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"{what}: the hub failed {request.attempts} times, at last with status {status}"
    reason = str(error) or type(error).__name__
    return (
        f"{what}: the hub cannot be reached ({reason}); is this machine offline? What arrived so far is kept"
    )


def _emptied(output: BinaryIO) -> int:
    output.seek(0)
    return output.truncate(0)


def _is_intact(file: _RemoteFile, path: Path) -> bool:
    if path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as content:
        if file.sha256:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        git = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
        while chunk := content.read(_CHUNK_BYTES):
            git.update(chunk)
        return git.hexdigest() == file.git_sha1
