"""Counts the modules and the forms that one request crosses, and the modules of one load, in a real server.

A server is started as a user starts it (`stoker serve`); `sys.setprofile` is on in each of its processes: the
server's, the engine's and the workers'. Then one streamed chat goes over HTTP, and one load of the model.

- A **module** counts if one of its functions ran between the first byte of the request and the quiet after
  the last byte of the answer, in any process. Module bodies (imports) do not count. What runs in a
  server that has nothing to do (measuring memory, heartbeats) does not count either: a function that ran in
  the idle seconds before is left out, unless its module has others that ran.
- A **form** is a class of `stoker` with an instance that was made for this request and holds, as one of its
  own fields or one container deep, the request's id, its prompt (text or tokens), its `GenerateRequest`, or
  some of its answer (text or tokens). Tables and owners, made before, hold requests and are none, nor is the
  body of the HTTP request, which holds what its caller wrote as it came, two containers deep.
- A **load** crosses a module of `client`, `ipc` or `engine` if one of its functions had the load in hand: its
  specification, its command or its state, as an argument, a local or a result. Between the command in the
  client and `ready` in the client, further modules run for it: those of these rooms are listed as such, and
  apart from them those that do the work (`models` reads the file, `machine` the memory, `backends` loads, an
  empty scheduler and cache are made). The route of HTTP that asks for it is not counted.

    python tools/trace_request.py                # the embedded model
    python tools/trace_request.py --model fake:  # in two seconds, without a model
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

MAX_MODULES = 95
MAX_FORMS = 14
MAX_LOAD_MODULES = 12

IDLE, REQUEST, LOAD = 1, 2, 3
PROMPT = "Name three birds that winter in Zanzibar"
FIRST_PROMPT = "What came before that nobody asked about, at some length"
NAME = "the-traced-request"
MAX_TOKENS = 12
LOAD_ROOMS = ("client", "ipc", "engine")
LOAD_CLASSES = ("ModelSpec", "LoadModel", "ModelState")
QUIET_S = 0.4
IDLE_S = 2.5
LIMIT_S = 60.0
_ANSWER = "answer:"
_FOLDER = "STOKER_TRACE_FOLDER"  # where the traced processes find the phase and leave what they saw
_SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "stoker") + os.sep


# ------------------------------------------------------------ inside a traced process


class Trace:
    """What ran in this process, by phase; written line by line, as a process may be killed.

    Args:
        folder: of the run: the file `phase`, one byte, and one file of lines a process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        self._lines = (folder / f"{os.getpid()}.lines").open("a", buffering=1, encoding="utf-8")
        self._seen: set[tuple[Any, ...]] = set()
        self._forms: set[type] = set()
        self._older: dict[int, object] | None = None
        self._busy = threading.local()

    def on(self) -> None:
        """Trace every thread from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, value: object) -> None:
        if event not in ("call", "return") or not (phase := self._phase[0]):
            return
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCE) or code.co_name == "<module>":
            return
        if (phase, code) not in self._seen:
            self._seen.add((phase, code))
            if not _is_class_body(frame):
                self._note(phase, "function", code)
        if phase == LOAD and (LOAD, code, "") not in self._seen and _has_load(frame, value):
            self._seen.add((LOAD, code, ""))
            self._note(phase, "carrier", code)
        if phase == REQUEST and not getattr(self._busy, "is_looking", False):
            self._busy.is_looking = True
            try:
                self._look(frame, value)
            finally:
                self._busy.is_looking = False

    def _note(self, phase: int, kind: str, code: CodeType) -> None:
        module = code.co_filename.removeprefix(_SOURCE).removesuffix(".py").replace(os.sep, ".")
        self._lines.write(f"{phase} {kind} {module} {code.co_qualname}\n")

    def _look(self, frame: FrameType, returned: object) -> None:
        """Note the forms among what a function has in hand."""
        if self._older is None:
            self._older = _instances()
        for held in itertools.chain(tuple(frame.f_locals.values()), (returned,)):
            for thing in (held, *_inside(held)):
                kind = type(thing)
                if kind in self._forms or not _is_ours(kind) or id(thing) in self._older:
                    continue
                name = f"{kind.__module__.removeprefix('stoker.')}.{kind.__qualname__}"
                for why in _marks(thing):
                    self._lines.write(f"{REQUEST} form {name} {why}\n")
                    if not why.startswith(_ANSWER):
                        self._forms.add(kind)


def _is_class_body(frame: FrameType) -> bool:
    return "__module__" in frame.f_locals and "__qualname__" in frame.f_locals


def _is_ours(kind: type) -> bool:
    return isinstance(kind.__module__, str) and kind.__module__.startswith("stoker.")


def _instances() -> dict[int, object]:
    """Every instance of a class of ours that there is before the request; kept, so that no id comes again."""
    import gc  # noqa: PLC0415 - only in traced processes

    return {id(thing): thing for thing in gc.get_objects() if _is_ours(type(thing))}


def _inside(held: object) -> tuple[object, ...]:
    """What a container holds, one level deep; nothing for what is none."""
    if isinstance(held, list | tuple | deque | set | frozenset):
        return tuple(itertools.islice(held, 64))
    if isinstance(held, dict):
        return tuple(itertools.islice(held.values(), 64))
    return ()


def _fields(thing: object) -> dict[str, object]:
    """Own fields of an instance, of whatever kind its class is; no property is asked."""
    names = [name for kind in type(thing).__mro__ for name in (*_structure(kind), *_slots(kind))]
    found = dict(getattr(thing, "__dict__", None) or {})
    for name in names:
        with contextlib.suppress(AttributeError):
            found[name] = getattr(thing, name)
    return found


def _structure(kind: type) -> tuple[str, ...]:
    names = getattr(kind, "__struct_fields__", ())
    return names if isinstance(names, tuple) else ()  # of msgspec's own base it is a descriptor


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    own = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in own
        if name not in ("__dict__", "__weakref__")
    )


def _marks(thing: object) -> Iterator[str]:
    """Fields by which an instance may be a form; a text's content too, as the answer is not known yet."""
    for name, value in _fields(thing).items():
        plain = name.strip("_")
        for part in (value, *_inside(value)):
            if type(part).__name__ == "GenerateRequest":
                yield f"{name}:request"
            elif isinstance(part, str) and (
                PROMPT in part or NAME in part or (plain == "request_id" and part)
            ):
                yield f"{name}:{'prompt' if PROMPT in part else 'id'}"
            elif isinstance(part, str) and part and plain in ("text", "delta", "piece"):
                yield f"{_ANSWER}{json.dumps(part)}"
        if _is_tokens(plain, value):
            yield f"{name}:tokens"


def _is_tokens(name: str, value: object) -> bool:
    """Whether it is a sequence of token ids, told by its name: no other request runs."""
    if "token" not in name and name not in ("prompt", "generated", "history"):
        return False
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    ids = value[:64]
    return bool(ids) and all(isinstance(part, int) and not isinstance(part, bool) for part in ids)


def _has_load(frame: FrameType, returned: object) -> bool:
    held = (*frame.f_locals.values(), returned)
    return any(type(thing).__name__ in LOAD_CLASSES for thing in held)


# ------------------------------------------------------------ outside: the run and its report


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run came to.

    Attributes:
        modules: those a streamed chat crosses.
        idle: modules left out, as everything of theirs that ran also runs without a request.
        forms: classes, and the field by which each is a form.
        load: modules of `LOAD_ROOMS` that a load crosses.
        load_aids: further modules of these rooms that run for it.
        load_workers: modules elsewhere that do its work.
    """

    modules: tuple[str, ...]
    idle: tuple[str, ...]
    forms: Mapping[str, str]
    load: tuple[str, ...]
    load_aids: tuple[str, ...]
    load_workers: tuple[str, ...]

    def text(self) -> str:
        """For people: the figures with their bars, then the lists by room."""
        parts = [
            f"streamed chat: {len(self.modules)} modules (bar {MAX_MODULES})",
            f"streamed chat: {len(self.forms)} forms (bar {MAX_FORMS})",
            f"model load: {len(self.load)} modules (bar {MAX_LOAD_MODULES})",
            f"  beside {len(self.load_aids)} that run for it and {len(self.load_workers)} that do its work",
            "",
            "MODULES OF A STREAMED CHAT",
            *_by_room(self.modules),
            "",
            "FORMS OF A STREAMED CHAT (class, field by which it is one)",
            *(f"  {name}  ({why})" for name, why in sorted(self.forms.items())),
            "",
            "MODULES THAT A LOAD CROSSES",
            *_by_room(self.load),
            "",
            "FURTHER MODULES OF THESE ROOMS THAT RUN FOR A LOAD (not counted)",
            *_by_room(self.load_aids),
            "",
            "MODULES THAT DO THE WORK OF A LOAD (not counted)",
            *_by_room(self.load_workers),
            "",
            "RAN DURING THE CHAT AND IN AN IDLE SERVER ALIKE (not counted)",
            *_by_room(self.idle),
        ]
        return "\n".join(parts)


def _folder(module: str) -> str:
    return module.rpartition(".")[0]


def _by_room(modules: tuple[str, ...]) -> Iterator[str]:
    for room, names in itertools.groupby(sorted(modules, key=_folder), key=_folder):
        own = [name.rpartition(".")[2] for name in names]
        yield f"  {room or '(top)'} ({len(own)}): {' '.join(own)}"


class TracedServer:
    """`stoker serve` with the trace on in each of its processes.

    Args:
        model: for `--model`; None: the embedded one.
        folder: an empty one, for what the processes see.
    """

    def __init__(self, model: str | None, folder: Path) -> None:
        self._folder = folder
        (folder / "phase").write_bytes(bytes(1))
        with (folder / "phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        hooks = folder / "hooks"
        hooks.mkdir()
        text = f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r}, run_name='__traced__')\n"
        (hooks / "sitecustomize.py").write_text(text, encoding="utf-8")
        path = os.pathsep.join((str(hooks), str(Path(_SOURCE).parent), os.environ.get("PYTHONPATH", "")))
        command = [
            sys.executable,
            "-m",
            "stoker.cli",
            "serve",
            "--port",
            "0",
            "--cache-dir",
            str(folder / "cache"),
        ]
        self._process = subprocess.Popen(
            [*command, *(("--model", model) if model else ())],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": path,
                _FOLDER: str(folder),
                "XDG_CACHE_HOME": str(folder / "xdg-cache"),
                "XDG_STATE_HOME": str(folder / "xdg-state"),
            },
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with {self._process.wait()} before it was ready")
        ready = json.loads(line)
        self._url = f"http://{ready['host']}:{ready['port']}"
        self.model: str = ready["models"][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @contextlib.contextmanager
    def phase(self, number: int) -> Iterator[None]:
        """What runs meanwhile, and until it is quiet, is noted under that number."""
        self._phase[0] = number
        yield
        size = -1
        while size != (size := sum(path.stat().st_size for path in self._folder.glob("*.lines"))):
            time.sleep(QUIET_S)
        self._phase[0] = 0

    def post(self, path: str, body: Mapping[str, Any], **headers: str) -> bytes:
        """The whole answer to a JSON body."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310 - our own server
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310 - likewise
            answer: bytes = response.read()
        return answer

    def wait_until(self, state: str) -> None:
        """Until the model is in that state.

        Raises:
            TimeoutError: it never is.
        """
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            with urllib.request.urlopen(f"{self._url}/v1/runtime") as response:  # noqa: S310 - our own server
                if json.load(response)["models"][0]["state"] == state:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"the model is never {state}")


def traced(model: str | None, folder: Path) -> Report:
    """Run the server, the chat and the load.

    Args:
        model: as of `stoker serve --model`; None: the embedded one.
        folder: an empty one.
    """
    with TracedServer(model, folder) as server:
        chat = {
            "model": server.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # the first prompts of a model come in small slices, as nothing is known of its steps
        first = [{"role": "user", "content": FIRST_PROMPT}]
        server.post("/v1/chat/completions", {**chat, "cache_salt": "another's", "messages": first})
        with server.phase(IDLE):
            time.sleep(IDLE_S)
        with server.phase(REQUEST):
            answer = server.post("/v1/chat/completions", chat, **{"X-Request-Id": NAME})
        if not answer.rstrip().endswith(b"data: [DONE]"):
            raise SystemExit(f"the stream did not end well: {answer[-500:]!r}")
        server.post("/v1/runtime/models/unload", {"model": server.model})
        server.wait_until("absent")
        with server.phase(LOAD):
            server.post("/v1/runtime/models/load", {"model": server.model})
    return report_of(folder, _text_of(answer))


def _text_of(stream: bytes) -> str:
    """The text that a stream of chunks brought."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def report_of(folder: Path, answer: str) -> Report:
    """What the processes of a run left in its folder; `answer` is the text that was streamed."""
    lines = [
        line.split(" ", 3)
        for path in sorted(folder.glob("*.lines"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    ran = {
        key: {(module, name) for phase, kind, module, name in lines if (int(phase), kind) == key}
        for key in itertools.product((IDLE, REQUEST, LOAD), ("function", "carrier"))
    }
    crossed = {module for module, _ in ran[REQUEST, "function"] - ran[IDLE, "function"]}
    rest = {module for module, _ in ran[LOAD, "function"] - ran[IDLE, "function"]}
    carries = {module for module, _ in ran[LOAD, "carrier"] if _room(module) in LOAD_ROOMS}
    aids = {module for module in rest - carries if _room(module) in LOAD_ROOMS}
    forms = {
        name: "text of the answer" if why.startswith(_ANSWER) else why
        for _, kind, name, why in lines
        if kind == "form" and (not why.startswith(_ANSWER) or json.loads(why.removeprefix(_ANSWER)) in answer)
    }
    return Report(
        modules=tuple(sorted(crossed)),
        idle=tuple(sorted({module for module, _ in ran[REQUEST, "function"]} - crossed)),
        forms=forms,
        load=tuple(sorted(carries)),
        load_aids=tuple(sorted(aids)),
        load_workers=tuple(
            sorted(module for module in rest - aids - carries if _room(module) not in ("server", "runtime"))
        ),
    )


def _room(module: str) -> str:
    return module.partition(".")[0]


def main() -> None:
    """Print the report; exit with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as of `stoker serve --model`; the embedded one if not given")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory(prefix="stoker-trace-") as folder:
        report = traced(model, Path(folder))
    print(report.text())
    is_good = (
        len(report.modules) <= MAX_MODULES
        and len(report.forms) <= MAX_FORMS
        and len(report.load) <= MAX_LOAD_MODULES
    )
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
elif __name__ == "__traced__":
    Trace(Path(os.environ[_FOLDER])).on()
