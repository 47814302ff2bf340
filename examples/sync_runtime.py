"""A chat answer streamed by a plain script: `python examples/sync_runtime.py [MODEL]`."""

# ruff: noqa: INP001, T201 - a script, which shows its result

import sys

import stoker.sync

model = sys.argv[1] if len(sys.argv) > 1 else None
with stoker.sync.Runtime(model, slots=1, ctx_size=4096) as runtime:
    messages = [{"role": "user", "content": "Name three colours."}]
    for delta in runtime.chat(messages, max_tokens=48, temperature=0.0):
        print(delta.text, end="", flush=True)
    print()
