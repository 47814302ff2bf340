"""Fetches the page's libraries from npm into static/vendor: `python -m tools.vendor_ui` (make vendor).

Owns which packages and versions they are, which of their files are taken, and the manifest that names each
file's package and SHA-256; a test holds the folder to it. Two things are changed in a file: names of packages
in imports become names of files beside it, as the page has no import map, and maps of sources are not named.
What npm delivers is checked by npm itself (its integrity sums).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

UI = Path(__file__).resolve().parents[1] / "src/stoker/server/ui"
VENDOR = UI / "static" / "vendor"
MANIFEST = UI / "vendor.json"


@dataclass(frozen=True)
class Library:
    """One file of a package.

    Attributes:
        name: of the file in static/vendor.
        package: of npm, with its version.
        path: of the file in the package.
    """

    name: str
    package: str
    path: str


LIBRARIES = (
    Library("preact.js", "preact@11.2.0", "dist/preact.mjs"),
    Library("hooks.js", "preact@11.2.0", "hooks/dist/hooks.mjs"),
    Library("htm.js", "htm@3.1.1", "dist/htm.mjs"),
)
FILE_OF = {"preact": "./preact.js"}
_IMPORT = re.compile(r'(?<=from)"(?P<name>[^"./][^"]*)"')
_MAP = re.compile(r"\n?//# sourceMappingURL=\S+\n?")


def fetched(package: str, folder: Path) -> Path:
    """The archive of a package. Raises CalledProcessError where npm has none."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]  # npm of the path
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / done.stdout.split()[-1]


def file_of(archive: Path, path: str) -> str:
    """The text of a file of an archive."""
    with tarfile.open(archive) as opened:
        member = opened.extractfile(f"package/{path}")
        assert member is not None, f"{archive.name} has no {path}"
        return member.read().decode()


def adapted(text: str) -> str:
    """The file as the page loads it."""
    text = _IMPORT.sub(lambda found: f'"{FILE_OF[found["name"]]}"', text)
    return _MAP.sub("\n", text).rstrip("\n") + "\n"


def licence_of(archive: Path) -> str:
    """The text of a package's licence; Apache's, which is Stoker's own too, is named."""
    text = file_of(archive, "LICENSE").strip()
    return text if "Apache License" not in text else "Apache License, Version 2.0: the LICENSE of Stoker."


def licences_text(licences: dict[str, str]) -> str:
    """Each text once, under the names of its packages."""
    packages = {text: [name for name in licences if licences[name] == text] for text in licences.values()}
    return "\n\n".join(f"{', '.join(names)}\n\n{text}\n" for text, names in packages.items())


def main() -> int:
    """Entry of `python -m tools.vendor_ui`."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    files, licences = {}, {}
    with tempfile.TemporaryDirectory(prefix="stoker-vendor-") as folder:
        packages = dict.fromkeys(library.package for library in LIBRARIES)
        archives = {package: fetched(package, Path(folder)) for package in packages}
        for library in LIBRARIES:
            archive = archives[library.package]
            content = adapted(file_of(archive, library.path)).encode()
            (VENDOR / library.name).write_bytes(content)
            name, _, version = library.package.rpartition("@")
            files[library.name] = {
                "package": name,
                "version": version,
                "source": library.path,
                "license": json.loads(file_of(archive, "package.json"))["license"],
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            licences[name] = licence_of(archive)
    MANIFEST.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
    (VENDOR / "LICENSES.txt").write_text(licences_text(licences), encoding="utf-8")
    print(f"{len(files)} files, {sum(path.stat().st_size for path in VENDOR.iterdir()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
