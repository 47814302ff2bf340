"""SmolLM2, which knows nothing of tools, made to call them: every call is JSON of its schema."""

import asyncio
import json

import jsonschema
import pytest

from stoker.ipc.request import FinishReason

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    },
    "book": {
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "people": {"type": "integer", "minimum": 1, "maximum": 12},
            "notes": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
        },
        "required": ["date", "people"],
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASKS = ("What is the weather in Paris?", "Book a table for four.", "Hello!", "{", "Wie geht es dir?")
NUM_CHATS = 6


@pytest.mark.long
async def test_required_and_named_calls_always_validate(runtime):
    """SPEC D7, D2: whatever is asked, at any temperature; only the named tool where one is named."""

    async def one(number):
        named = {"type": "function", "function": {"name": "book"}}
        chat = runtime.chat(
            [{"role": "user", "content": ASKS[number % len(ASKS)]}],
            tools=TOOLS,
            tool_choice=named if number % 2 else "required",
            parallel_tool_calls=False,
            temperature=number % 3 / 2,
            seed=number,
            max_tokens=200,
        )
        deltas = [delta async for delta in chat]
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert len(calls) == 1, deltas[-1]
        jsonschema.validate(json.loads(calls[0].arguments), SCHEMAS[calls[0].name])
        assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS
        assert calls[0].name == "book" or not number % 2
        return calls[0].name

    names = await asyncio.gather(*map(one, range(NUM_CHATS)))
    assert set(names) <= set(SCHEMAS)
