"""Models of MLX in a real engine that is killed, suspended and started again: no text changes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from test_cache_after_kill import until_saved
from test_kill import Answer, Trouble, Troubled, ask, kill_once, leave_alone, mixed

from model_folders import tiny_folder
from seeing_folders import seeing_folder
from stoker import GenerateRequest, Runtime, Sampling
from stoker.backends.mlx.vision import library
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import IMAGE_MARKER
from tiny_projector import picture_of

MODELS = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma3_text", "mamba")),
]
LONG = " ".join(f"hello world {number} and" for number in range(20))
"""Longer than the window of the model that has one."""


async def suspend_once(runtime: Runtime, answers: list[Answer]) -> None:
    """The engine leaves in the middle of every stream, and comes back."""
    for answer in answers:
        await answer.reach(4)
    await runtime.suspend()
    await runtime.resume()


async def over_trouble(runtime: Runtime, trouble: Troubled) -> list[Answer]:
    """Four streams and what they were given."""
    answers = [Answer() for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        for request, answer in zip(mixed(max_tokens=40), answers, strict=True):
            group.create_task(ask(runtime, request, answer))
        await trouble.make(runtime, answers)
    return answers


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
async def test_texts_outlast_a_kill_a_suspend_and_the_program(name: str, tmp_path: Path) -> None:
    """SPEC F8, L2, L3, C9: four streams each time; then another program finds the prompt on disk."""
    pytest.importorskip("mlx_lm", reason="MLX is not installed (the mlx extra)")
    model = str(tiny_folder(tmp_path / name, name))
    settings = {"ctx_size": 2048, "threads": 1, "cache_dir": tmp_path / "cache", "cache_disk_bytes": 2**26}
    request = GenerateRequest(prompt=LONG, max_tokens=8, sampling=Sampling(temperature=0.0), ignore_eos=True)
    async with Runtime(model, **settings) as runtime:
        expected = await over_trouble(runtime, Troubled(lambda *_: runtime.status(), 0))
        for make in (kill_once, suspend_once):
            answers = await over_trouble(runtime, Troubled(make, 1))
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
            assert [answer.num_ends for answer in answers] == [1] * 4
        first, said = await asked(runtime, request)
        await until_saved(runtime)
        assert (await runtime.status()).restarts == 1
    async with Runtime(model, **settings) as runtime:
        again, said_again = await asked(runtime, request)
    assert said_again == said
    assert (again.usage.cache_source, again.usage.cached_tokens > 32) == ("disk", True)
    assert first.usage.completion_tokens == again.usage.completion_tokens == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava-clip", "smolvlm"])
async def test_answers_about_pictures_outlast_a_kill_and_a_suspend(kind: str, tmp_path: Path) -> None:
    """SPEC F10, L2, L3: each stream has pictures of its own; nothing is asked of the caller again."""
    if not library.installed_version():
        pytest.skip("mlx-vlm is not installed (the mlx-vlm extra)")
    model = str(seeing_folder(tmp_path / kind, kind))
    requests = [
        GenerateRequest(
            prompt=f"{IMAGE_MARKER} what is it, and {IMAGE_MARKER} that?",
            pictures=(picture_of(seed, 60, 40), picture_of(9, 30, 50)),
            max_tokens=40,
            sampling=Sampling(temperature=0.8, seed=seed),
            ignore_eos=True,
        )
        for seed in range(4)
    ]
    async with Runtime(model, ctx_size=2048, threads=1, isolation="process") as runtime:
        expected = await told(runtime, requests, leave_alone)
        for make in (kill_once, suspend_once):
            assert await told(runtime, requests, make) == expected
        assert (await runtime.status()).restarts == 1
    assert len({tuple(tokens[0]) for tokens in expected}) == 4


async def told(
    runtime: Runtime, requests: list[GenerateRequest], make: Trouble
) -> list[dict[int, list[int]]]:
    """The tokens of streams that run into trouble."""
    answers = [Answer() for _ in requests]
    async with asyncio.TaskGroup() as group:
        for request, answer in zip(requests, answers, strict=True):
            group.create_task(ask(runtime, request, answer))
        await make(runtime, answers)
    assert [answer.num_ends for answer in answers] == [1] * len(answers)
    return [answer.tokens for answer in answers]


async def asked(runtime: Runtime, request: GenerateRequest) -> tuple[Finished, list[int]]:
    """How a request ended, and its tokens."""
    answer, ends = Answer(), []
    async with aclosing(runtime.stream(request)) as events:
        async for event in events:
            if isinstance(event, Finished):
                ends.append(event)
            elif isinstance(event, Delta):
                await answer.take(event)
    (end,) = ends
    return end, answer.tokens[0]
