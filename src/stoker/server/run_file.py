"""The run file of a server, by which programs of the same user find it: there from ready until exit.

Owns its form and place, one file a server below `run_dir`, readable by its owner alone. Whether a server that
left no trace of its end still answers is asked by who wants to use it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from typing import TYPE_CHECKING

import msgspec
import psutil

from stoker.private import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER_NAME = "servers"

log = logging.getLogger(__name__)


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself.

    Attributes:
        url: where this machine's programs reach it.
        pid: its process.
        version: of Stoker.
        started_at: seconds since the epoch.
        models: ids of the models it serves, each with the path of its file.
    """

    url: str
    pid: int
    version: str
    started_at: float
    models: dict[str, str] = {}


def url_of(host: str, port: int) -> str:
    """The URL by which this machine's programs reach a server bound to `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")  # noqa: PLR2004
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"  # noqa: PLR2004


@contextlib.contextmanager
def registered(run_dir: Path, entry: RunFile) -> Iterator[None]:
    """While entered, `found_servers` tells of the server. A folder that cannot be written is a warning."""
    file = run_dir / FOLDER_NAME / f"{entry.pid}.json"
    try:
        write_text(file, msgspec.json.encode(entry).decode())
    except OSError as error:
        log.warning("commands will not find this server by themselves: %s: %s", file, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def found_servers(run_dir: Path) -> list[RunFile]:
    """The servers whose process lives, the last started first; files that a crash has left are removed.

    One that cannot be read, as another version's may, is passed over, and stays while its process lives.
    """
    found = []
    for file in (run_dir / FOLDER_NAME).glob("*.json"):
        if not _is_alive(file.stem):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        elif (entry := _read(file)) is not None:
            found.append(entry)
    return sorted(found, key=lambda entry: entry.started_at, reverse=True)


def _is_alive(pid: str) -> bool:
    try:
        return bool(psutil.pid_exists(int(pid)))
    except (ValueError, OverflowError):  # no process has such a number
        return False


def _read(file: Path) -> RunFile | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunFile)
    except (OSError, ValueError):  # no JSON of ours, or no text
        return None
