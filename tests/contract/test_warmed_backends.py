"""Warming steps on every backend: what sequences hold stays, and nothing else does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from test_backend_contract import assert_near, feed, prompt

from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.engine.runners.warming import Warming
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.models.gguf.header import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.backends.protocol.backend import Backend

PLACE = frozenset({"card"})
OPTIONS = ContextOptions(num_cells=512, n_batch=256, num_sequences=8, num_threads=1, draws=True)
WAYS = {"pool": OPTIONS, "streams": dataclasses.replace(OPTIONS, has_streams=True)}


def warmed(backend: Backend) -> None:
    """Every warming step there is, as if devices computed it."""
    clock = Stopwatch(60.0)
    warming = Warming("m", backend, StepTimer(clock), PLACE, 4)
    while not warming.is_done:
        warming.step(backend.capabilities.num_cells)
    assert clock.num_steps == 0
    assert clock.read()[0] == 0.0, "a step is still watched"


def test_a_sequence_goes_on_behind_warming_steps_as_before_them(any_generating: Backend) -> None:
    """SPEC B8: its tokens are left alone, and every other sequence is as empty as it was."""
    backend, tokens = any_generating, prompt(any_generating)
    feed(backend, 1, tokens[:-1])
    feed(backend, 0, tokens[:-1])
    expected = feed(backend, 1, tokens[-1:])
    backend.drop(1)
    warmed(backend)
    held = [backend.length(seq) for seq in range(backend.capabilities.num_sequences)]
    assert held == [len(tokens) - 1] + [0] * (len(held) - 1)
    assert_near(backend, feed(backend, 0, tokens[-1:]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_candidates_behind_warming_steps_are_those_of_the_whole_rows(tiny_decoder: Path, way: str) -> None:
    """SPEC B6, B8: graphs of warming steps are used again for rows that requests draw from."""
    model = LlamaModel(ModelOptions(path=tiny_decoder))
    with LlamaBackend(model, LlamaContext(model, WAYS[way]), read_header(tiny_decoder)) as backend:
        tokens = tuple(prompt(backend))
        items = [PlanItem(seq, 0, tokens[: 4 + seq], 1) for seq in range(3)]
        rows = backend.launch(BatchPlan(tuple(items))).rows().copy()
        for seq in range(3):
            backend.drop(seq)
        warmed(backend)
        taking = tuple(PlanItem(each.seq, 0, each.tokens, 1, takes_candidates=True) for each in items)
        in_flight = backend.launch(BatchPlan(taking))
        assert in_flight.rows().shape[0] == 0
        assert in_flight.candidates().ids[:, 0].tolist() == rows.argmax(axis=1).tolist()
