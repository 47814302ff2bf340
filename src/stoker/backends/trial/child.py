"""The child process of a trial: load a model by its backend, decode a batch and one token, say how it went.

    python -m stoker.backends.trial.child MODULE MODEL

MODULE has `open_model`, MODEL is a ModelSpec as JSON. It prints one line of JSON: `detail` (what is wrong,
empty if nothing is), `label`, `token_s`, and the `error` of a refusal. A crash says the rest by its signal.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.protocol.encoding import Encoder
from stoker.errors import StokerError
from stoker.ipc.model import ModelSpec
from stoker.models.reader import LoadContext
from stoker.native_crash import prepare_to_crash

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Backend
    from stoker.models.reader import ModelReader

NUM_TOKENS = 16


def main(arguments: list[str]) -> int:
    """Run the trial and print its outcome; the exit code is 0 whatever that is."""
    module, given = arguments
    prepare_to_crash()
    spec = msgspec.json.decode(given, type=ModelSpec)
    label, token_s, refusal = "", 0.0, None
    try:
        reader: ModelReader = import_module(module).open_model(spec.path)
        backend = reader.load(spec, LoadContext(lambda _: None))
        try:
            label, detail = backend.capabilities.label, ""
            if not isinstance(backend, Encoder):
                detail, token_s = _decode(backend)
        finally:
            backend.close()
    except StokerError as error:
        detail, refusal = error.message, error.info()
    except Exception as error:  # noqa: BLE001 - whatever its libraries raise, the parent is told
        detail = f"{type(error).__name__}: {error}"
    said = {"detail": detail, "label": label, "token_s": token_s, "error": refusal}
    print(msgspec.json.encode(said).decode())  # noqa: T201 - for the parent
    return 0


def _decode(backend: Backend) -> tuple[str, float]:
    """What is wrong with the logits of a batch and of the token after it, and the seconds of that token."""
    n_vocab = backend.capabilities.n_vocab
    num = min(NUM_TOKENS, backend.capabilities.n_batch)
    tokens = [1 + at % max(1, n_vocab - 1) for at in range(num)]
    took_s = 0.0
    for start, given in ((0, tokens), (num, tokens[:1])):
        begun_s = time.perf_counter()
        rows = backend.launch(BatchPlan((PlanItem(0, start, given, 1),))).rows()
        took_s = time.perf_counter() - begun_s
        if rows.shape != (1, n_vocab):
            return f"it gave logits of shape {rows.shape} for {n_vocab} tokens", took_s
        if not np.isfinite(rows).all() or rows.min() == rows.max():
            return "it computed logits that are no numbers, or all the same", took_s
    return "", took_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
