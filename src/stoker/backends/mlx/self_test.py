"""What MLX does on this machine, tried with a small network of random weights; for `stoker doctor`.

Nothing is downloaded and no model's file is needed, so whoever has another device than we had can run it and
paste what it says.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from stoker.backends.mlx import native
from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.network import Network
from stoker.backends.mlx.state import HeldSequence, StateFormat
from stoker.backends.mlx.vision.library import INSTALL, installed_version
from stoker.backends.mlx.vision.tower import embeddings, small_tower

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Rows

_SEED = 7
_VOCABULARY, _WIDTH, _EDGE = 320, 128, 32
_TOKENS = tuple(range(3, 43))
_TOLERANCE = 2e-2
"""Logits of a few units; a device that multiplies in 19 bits is off by some thousandths."""
_FIRST_BYTES = 16


Tried: TypeAlias = tuple[str, bool, str]
"""What was tried, whether it did what it should, and figures or what went wrong."""


def self_test() -> list[Tried]:
    """Everything that models need of MLX here; never raises, takes a second or two."""
    native.enter_thread()
    blas = native.BLAS.name if native.BLAS else "its own"
    libraries = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    found = [("libraries", True, f"{libraries}; {native.label()}; multiplies with {blas}")]
    found.append(_tried("matrices are multiplied right", _products))
    try:
        network = _network()
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return [*found, ("a network is made", False, f"{type(error).__name__}: {error}")]
    for name, trial in (
        ("a prompt in parts is the prompt at once", _parts),
        ("steps return before the device is done", _ahead),
        ("a state goes out and in to the bit", _states),
        ("cells of 8 bits compute nearly the same", _few_bits),
    ):
        found.append(_tried(name, partial(trial, network)))
    return [*found, _tried("a picture is encoded as on the CPU", _picture)]


def _tried(name: str, trial: Callable[[], str]) -> Tried:
    try:
        return (name, True, trial())
    except Exception as error:  # noqa: BLE001 - likewise
        return (name, False, f"{type(error).__name__}: {error}")


def _network() -> Network:
    mx.random.seed(_SEED)
    module = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=_WIDTH,
            num_hidden_layers=2,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=_VOCABULARY,
            tie_word_embeddings=True,
        )
    )
    mx.eval(module.parameters())
    return Network(module, "", ())


def _products() -> str:
    left = np.random.default_rng(_SEED).standard_normal((64, 512), np.float32)
    right = np.random.default_rng(_SEED + 1).standard_normal((512, 256), np.float32)
    off = float(np.abs(np.array(mx.array(left) @ mx.array(right)) - left @ right).max())
    if off > 0.5:  # noqa: PLR2004 - sums of 512 products of a few units each
        raise ValueError(f"they are off by {off:.3g}")
    return f"off by {off:.1e} at most"


def _logits(network: Network, tokens: tuple[int, ...], parts: int = 1) -> Rows:
    caches = network.new_caches()
    size = -(-len(tokens) // parts)
    for begin in range(0, len(tokens), size):
        part = tokens[begin : begin + size]
        out = network.forward(mx.array([part]), caches, [len(part) - 1], ())
        mx.eval(out, kinds.arrays(caches))
    row: Rows = np.array(out)[0]
    return row


def _parts(network: Network) -> str:
    return _near(_logits(network, _TOKENS), _logits(network, _TOKENS, parts=5), _TOLERANCE)


def _ahead(network: Network) -> str:
    caches = network.new_caches()
    began_s = time.perf_counter()
    out = network.forward(mx.array([_TOKENS]), caches, [len(_TOKENS) - 1], ())
    mx.async_eval(out, kinds.arrays(caches))
    launched_s = time.perf_counter()
    mx.eval(out)
    over_s = time.perf_counter()
    return f"launched in {1e3 * (launched_s - began_s):.2f} ms, over in {1e3 * (over_s - began_s):.2f} ms"


def _states(network: Network) -> str:
    caches = network.new_caches()
    mx.eval(network.forward(mx.array([_TOKENS]), caches, [0], ()), kinds.arrays(caches))
    states = StateFormat(bytes(_FIRST_BYTES), network.new_caches)
    data = states.packed(HeldSequence(list(_TOKENS), caches, []))
    again = states.unpacked(data)
    held = kinds.shared(kinds.trimmed(caches))
    ours, theirs = (
        np.array(network.forward(mx.array([[9]]), each, [0], ())) for each in (held, again.caches)
    )
    if not np.array_equal(ours, theirs):
        raise ValueError("what was put back computes other logits")
    return f"{len(data)} bytes"


def _few_bits(network: Network) -> str:
    caches = kinds.quantised(network.new_caches(), 8, (32,))
    out = network.forward(mx.array([_TOKENS]), caches, [len(_TOKENS) - 1], ())
    return _near(_logits(network, _TOKENS), np.array(out)[0], 0.1)


def _picture() -> str:
    if not installed_version():
        return f"not tried, mlx-vlm is not installed: {INSTALL}"
    mx.random.seed(_SEED)
    tower = small_tower(_WIDTH)
    square = np.random.default_rng(_SEED).standard_normal((_EDGE, _EDGE, 3), np.float32)
    found = embeddings(tower, square)
    with mx.stream(mx.cpu):
        text = _near(found, embeddings(tower, square), _TOLERANCE)
    return f"mlx-vlm {installed_version()}, {text}"


def _near(found: Rows, expected: Rows, tolerance: float) -> str:
    off = float(np.abs(found - expected).max())
    if not off <= tolerance:
        raise ValueError(f"logits are off by {off:.3g}, {tolerance} is possible")
    return f"off by {off:.1e} at most"
