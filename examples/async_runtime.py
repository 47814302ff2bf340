"""Two requests at once on one model: `python examples/async_runtime.py [MODEL]`."""

# ruff: noqa: INP001, T201 - a script, which shows its result

import asyncio
import sys

from stoker import Runtime, TextDelta


async def answer(runtime: Runtime, prompt: str) -> str:
    """Collect one completion and its figures."""
    text = ""
    last = TextDelta()
    async for delta in runtime.generate(prompt, max_tokens=24, temperature=0.0):
        text += delta.text
        last = delta
    if last.usage and last.timings:
        text += f"\n  [{last.usage.completion_tokens} tokens in {last.timings.decode_s:.1f} s]"
    return f"{prompt}{text}"


async def main(model: str | None) -> None:
    """Serve `model`, or the embedded one, and ask it two things at the same time."""
    async with Runtime(model, slots=4, ctx_size=4096) as runtime:
        prompts = ["The capital of France is", "The largest planet is"]
        for text in await asyncio.gather(*(answer(runtime, prompt) for prompt in prompts)):
            print(text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
