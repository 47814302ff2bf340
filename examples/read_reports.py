"""Read photographed reports into a table.

    python examples/read_reports.py MODEL.gguf MMPROJ.gguf REPORT.png...

Each report has a name, a date and results; the schema says so to the model and checks what it answers. What
cannot be read is told of and does not stop the rest.
"""

# ruff: noqa: INP001, T201 - a script, which shows its result

from __future__ import annotations

import asyncio
import sys

from stoker import Image, Runtime, StokerError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "date": {"type": "string"},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("test", "value", "unit")},
                "required": ["test", "value", "unit"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "date", "results"],
    "additionalProperties": False,
}


async def main(model: str, mmproj: str, paths: list[str]) -> None:
    """Print one row a result."""
    async with Runtime(model, mmproj=mmproj, slots=2) as runtime:
        print(f"{'name':<20} {'date':<11} {'test':<12} {'value':>8} unit")
        for path in paths:
            try:
                reading = await runtime.read(Image(path), schema=SCHEMA)
            except StokerError as error:
                print(f"{path}: {error.message}", file=sys.stderr)
                continue
            report = reading.value
            for row in report["results"]:
                print(
                    f"{report['name']:<20} {report['date']:<11} "
                    f"{row['test']:<12} {row['value']:>8} {row['unit']}"
                )


if __name__ == "__main__":
    match sys.argv[1:]:
        case [model, mmproj, *paths] if paths:
            asyncio.run(main(model, mmproj, paths))
        case _:
            sys.exit(__doc__)
