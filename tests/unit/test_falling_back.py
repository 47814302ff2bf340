"""A request under way when what serves its model gives way to another: an engine in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stoker.client.models.registry import MAX_STEP_CRASHES, ModelRegistry
from stoker.client.models.specs import FoundModel
from stoker.client.process.exit import EngineExit
from stoker.engine.jobs.vocabulary import VocabularyDigests
from stoker.engine.residency.load import Load, is_for_others
from stoker.engine.residency.pending import cannot_go_on
from stoker.errors import (
    BackendChangedError,
    BackendUnavailableError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelFileError,
    ModelTooLargeError,
    StokerError,
)
from stoker.ipc.commands import Submit
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.runtime import Runtime
from stoker.settings import EngineSettings

FIRST = "fake:id=first,eog_period=0,step_delay_s=0.01"
POISON = "\x07"
DIES = f"{FIRST},abort_tokens={ord(POISON)}"
NUM_TOKENS = 120


def runtime_of(tmp_path: Path, file: str, twin: str) -> Runtime:
    """One model with a twin."""
    folders = {
        "cache_dir": tmp_path / "cache",
        "models_dir": tmp_path / "models",
        "run_dir": tmp_path / "run",
    }
    table = {"file": file, "fallback": twin, "load": True}
    return Runtime(
        settings=EngineSettings(model_tables={"m": table}, isolation="process", slots=4, **folders)
    )


async def text_of(runtime: Runtime, prompt: str, num_tokens: int) -> str:
    """One greedy answer, whole."""
    fields: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    return "".join([delta.text async for delta in runtime.generate(prompt, **fields)])


async def disturbed(runtime: Runtime) -> tuple[str | StokerError, str | StokerError]:
    """A long answer, and one that ends each engine that computes it with the first way."""
    long = asyncio.create_task(text_of(runtime, "a long one ", NUM_TOKENS))
    async for delta in runtime.generate("one before ", max_tokens=8, temperature=0.0):
        del delta  # the long one has tokens by now: both decode side by side
    short = asyncio.create_task(text_of(runtime, POISON, 3))
    return tuple(await asyncio.gather(long, short, return_exceptions=True))  # type: ignore[return-value]


@pytest.mark.long
async def test_a_backend_that_ends_engines_gives_way_and_streams_go_on(tmp_path: Path) -> None:
    """K9: over equal token ids the long text is whole and the same; the new way says why it serves."""
    async with runtime_of(tmp_path, FIRST, "fake:id=x") as runtime:
        undisturbed = await text_of(runtime, "a long one ", NUM_TOKENS)
    async with runtime_of(tmp_path, DIES, FIRST) as runtime:
        text, short = await disturbed(runtime)
        assert text == undisturbed
        assert len(short) == 3
        (model,) = runtime.models
        assert model.path == FIRST
        assert "it ended the engine 2 times" in model.backend_reason
        assert (await runtime.status()).restarts == MAX_STEP_CRASHES
        await runtime.suspend()
        await runtime.resume()  # the machine has slept: what failed may work again
        assert len(await text_of(runtime, "x", 3)) == 3
        assert (runtime.models[0].path, runtime.models[0].backend_reason) == (DIES, "")


async def test_tokens_of_another_vocabulary_end_their_request_with_a_typed_error(tmp_path: Path) -> None:
    """K9: what was delivered cannot be continued; nothing wrong follows, and who asks again is answered."""
    async with runtime_of(tmp_path, DIES, f"{FIRST},shift=3") as runtime:
        error, short = await disturbed(runtime)
        assert isinstance(error, BackendChangedError)
        assert error.details["num_tokens"] > 0
        assert error.details["before"] == f"fake {DIES}"
        assert len(short) == 3  # it had no token yet: its text is tokenised anew
        assert len(await text_of(runtime, "a long one ", 5)) == 5


async def test_a_load_that_ends_engines_gives_way(tmp_path: Path) -> None:
    """K9: after two engines, as a model without another way would be refused."""
    async with runtime_of(tmp_path, "fake:load_aborts=1", FIRST) as runtime:
        assert len(await text_of(runtime, "x", 3)) == 3
        assert "its load ended the engine 2 times" in runtime.models[0].backend_reason
        assert runtime.models[0].path == FIRST


# ---------------------------------------------------------------- the rule, without an engine


def way(path: str, template: str = "t") -> ModelSpec:
    """One way to serve the model "m"."""
    return ModelSpec(id="m", path=path, backend="b", chat_template=template)


@pytest.mark.parametrize(
    ("fields", "request_fields", "says"),
    [
        ({"generated": [[1, 2]], "vocabulary": "other"}, {}, "2 tokens were delivered"),
        ({"generated": [[1, 2]], "vocabulary": ""}, {}, "2 tokens were delivered"),
        ({"generated": [[1, 2]], "vocabulary": "same"}, {}, ""),
        ({}, {"prompt": (1, 2)}, "holds token ids"),
        ({}, {"sampling": Sampling(logit_bias={5: 1.0})}, "holds token ids"),
        ({}, {"is_chat": True}, "another chat template"),
        ({"vocabulary": "same"}, {"is_chat": True}, ""),
        ({"made_for": "b third"}, {"is_chat": True}, ""),
        ({"made_for": ""}, {"prompt": (1, 2)}, ""),
        ({"made_for": "b second"}, {"prompt": (1, 2)}, ""),
        ({}, {}, ""),
    ],
)
def test_what_goes_on_with_another_way(fields: dict, request_fields: dict, says: str) -> None:
    """K9: ids only where they mean the same, a conversation's text only under the same template."""
    spec = ModelSpec(
        id="m",
        path="first",
        backend="b",
        chat_template="t",
        fallbacks=(way("second", "u"), way("third", "u")),
    )
    load = Load(None, spec, None, 0.0, is_reload=False)  # type: ignore[arg-type]
    assert load.pass_on(ModelFileError("b.gguf is broken"))
    assert load.passed_over == ("b: b.gguf is broken",)
    load.vocabulary = VocabularyDigests(whole="same")
    request = GenerateRequest(**{"prompt": "x", "model": "m", **request_fields})
    error = cannot_go_on(Submit(request_id="r", request=request, **{"made_for": "b first", **fields}), load)
    assert (says in error.message and error.code == "backend_changed") if says else error is None


def test_only_what_another_backend_may_do_is_passed_on() -> None:
    """K8: memory and heat are the machine's, whoever serves."""
    for error in (
        BackendUnavailableError("x"),
        ModelFileError("x"),
        InvalidRequestError("x", param="device"),
    ):
        assert is_for_others(error)
    for other in (
        InsufficientMemoryError("x"),
        ModelTooLargeError("x"),
        InvalidRequestError("x", param="slots"),
    ):
        assert not is_for_others(other)


def test_ways_are_given_up_one_by_one_and_taken_back_after_a_sleep() -> None:
    """K9: a refusal comes only after the last; a sleep or a load by name begins with the first again."""
    spec = ModelSpec(id="m", path="first", backend="b", fallbacks=(way("second"),))
    registry = ModelRegistry([FoundModel(spec, ModelInfo.bare(spec))])
    exit_ = EngineExit("died", is_blamable=True)

    def crash_load() -> None:
        loading = registry.next_due()
        assert loading is not None
        path = loading.spec.path
        registry.record(ModelState(model="m", state="loading", stage="weights", path=path, backend="b"))
        registry.charge(exit_)
        registry.begin_instance()

    for path in ("first", "first", "second", "second"):
        assert registry.get("m").to_load.path == path
        crash_load()
    assert registry.failure("m").code == "model_load_crashed"
    registry.suspend()
    assert registry.get("m").to_load.path == "first"
