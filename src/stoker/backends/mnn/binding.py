"""The door to MNN's library: its import, what it computes with, and one loaded language model.

Within its calls MNN holds the interpreter's lock: no other thread of the process runs before they are over
(docs/mnn.md has the figures).
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.errors import BackendUnavailableError, ModelLoadError, StepFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from stoker.backends.mnn.folder import MnnFolder
    from stoker.backends.protocol.backend import Rows

_RUNNING = 0  # LlmStatus
_X86 = (("avx512f", "AVX512"), ("avx2", "AVX2"), ("avx", "AVX"), ("sse4_1", "SSE"))


def library() -> ModuleType:
    """MNN's module of language models. Raises BackendUnavailableError where it is not installed."""
    try:
        import MNN.llm as found  # noqa: PLC0415 - an extra
    except ImportError as error:
        text = f"MNN is not installed ({error}): pip install 'stoker[mnn]'"
        raise BackendUnavailableError(text, backend="mnn") from error
    return found  # type: ignore[no-any-return, unused-ignore]


def library_version() -> str:
    """Of MNN. Raises BackendUnavailableError where it is not installed."""
    library()
    import MNN  # noqa: PLC0415 - an extra

    return str(MNN.version())


def label() -> str:
    """What computes, for people: the widest instructions that this CPU has."""
    return f"MNN · {instructions()}"


def instructions(machine: str = "", flags: str | None = None) -> str:
    """The widest instructions of a CPU that MNN has kernels for.

    Args:
        machine: as `platform.machine` says it; empty: this one.
        flags: of the CPU as Linux names them; None: this one's.
    """
    machine = (machine or platform.machine()).lower()
    if machine in {"arm64", "aarch64"} or machine.startswith("armv"):
        return "NEON"
    have = (_cpu_flags() if flags is None else flags).split()
    return next((name for flag, name in _X86 if flag in have), "CPU")


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


class MnnModel:
    """A loaded model and its one sequence, driven by one thread.

    A sequence that is cut short is told to MNN with the next step: it remembers one such cut at a time.

    Args:
        folder: a sound one.
        num_threads: of the CPU, for as long as it is loaded.

    Raises:
        ModelLoadError: MNN refuses it.
        BackendUnavailableError: MNN is not installed.
    """

    def __init__(self, folder: MnnFolder, num_threads: int) -> None:
        self.native: Any = _loaded(folder, num_threads)
        self.length = 0

    def __repr__(self) -> str:
        return f"<MnnModel with {self.length} tokens>"

    def cut(self, length: int) -> None:
        """Keep the first tokens."""
        self.length = min(self.length, length)

    def step(self, tokens: Sequence[int], num_rows: int) -> Rows:
        """Append tokens; logits of the last `num_rows` of them, float32 (num_rows, n_vocab).

        Raises:
            StepFailedError: MNN failed; the sequence is as it was before.
        """
        assert tokens, "MNN divides by the number of tokens"
        before = self.length
        self._tell_cut()
        num_last = num_rows if num_rows > 1 else 0
        head, tail = list(tokens[: len(tokens) - num_last]), list(tokens[len(tokens) - num_last :])
        try:
            rows = self._forward(head) if head else None
            if tail:
                rows = self._forward_all(tail)
        except StepFailedError:
            self.length = before
            raise
        assert rows is not None, "a step without tokens"
        return rows if num_rows else rows[:0]

    def close(self) -> None:
        """Free it; idempotent."""
        self.native = None

    def _tell_cut(self) -> None:
        held = self.native.get_current_history()
        if held < self.length:
            raise StepFailedError(f"MNN holds {held} tokens of {self.length}", seq=0, length=self.length)
        if self.length == 0:
            self.native.reset()
        elif held > self.length:
            self.native.erase_history(self.length, 0)

    def _forward(self, tokens: list[int]) -> Rows:
        """The last row. Of more than one token MNN would keep kernels for each number of them."""
        if len(tokens) > 1:
            self.native.generate_init(None, None)
        return self._computed(tokens)

    def _forward_all(self, tokens: list[int]) -> Rows:
        """The row of each token."""
        self._tell({"all_logits": True})
        try:
            self.native.generate_init(None, None)
            return self._computed(tokens)
        finally:
            self._tell({"all_logits": False})

    def _computed(self, tokens: list[int]) -> Rows:
        found = self.native.forward(tokens)
        status = self.native.get_context()["status"]
        if status != _RUNNING:  # and what it has returned is not to be touched
            self.native.generate_init(None, None)
            raise StepFailedError(
                f"MNN could not compute {len(tokens)} tokens after {self.length} (status {status})",
                seq=0,
                length=self.length,
            )
        rows = np.asarray(found.read(), np.float32)
        self.length += len(tokens)
        return rows.reshape(-1, rows.shape[-1])

    def _tell(self, settings: dict[str, Any]) -> None:
        self.native.set_config(json.dumps(settings))


def _loaded(folder: MnnFolder, num_threads: int) -> Any:
    """The native model. It reads a folder of links and settings of ours: what it may open is settled so."""
    create = library().create
    with tempfile.TemporaryDirectory(prefix="stoker-mnn-") as name:
        place = Path(name)
        for link, file in folder.links().items():
            (place / link).symlink_to(os.path.abspath(file))  # noqa: PTH100 - links within stay as they are
        own = {"backend_type": "cpu", "thread_num": num_threads, "reuse_kv": True, "sampler_type": "greedy"}
        settings = {**folder.native_settings(), **own, "llm_config": "llm_config.json"}
        (place / "config.json").write_text(json.dumps(settings))
        (place / "llm_config.json").write_text("{}")
        native = create(str(place / "config.json"))._c_obj  # noqa: SLF001 - its wrapper hides the outcome
        if not native.load():
            raise ModelLoadError(f"{folder.path}: MNN could not load it", path=str(folder.path))
    return native
