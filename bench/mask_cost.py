"""What a constraint costs: compiling it, and the mask of one token on a model's vocabulary.

Texts are drawn at random from what each constraint allows, on the vocabulary of a GGUF file without its
weights. A token's cost is what the engine pays beside sampling: the mask, forbidding by it, and moving on.

    python -m bench.mask_cost --model FILE [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import numpy as np

from bench.errors import BenchError
from stoker.backends.llama.binding import llama, start
from stoker.backends.llama.text.vocabulary import LlamaVocabulary
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_TOKENS = 2000
MAX_TEXT_TOKENS = 200
NUM_COMPILES = 20
_ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99999},
        "status": {"enum": ["open", "paid", "sent"]},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "mail": {"pattern": "^[a-z]+@[a-z]+$"},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 5},
    },
    "required": ["id", "status", "lines"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "price": {"type": "number", "minimum": 0}},
            "required": ["text", "price"],
            "additionalProperties": False,
        }
    },
}
_SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
CONSTRAINTS = {
    "JSON Schema": Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(_ORDER)),
    "any JSON object": Constraint(kind=ConstraintKind.JSON_OBJECT),
    "regex": Constraint(kind=ConstraintKind.REGEX, source=r"([A-Z][a-z]+ ){3,30}\d{4}-\d{2}-\d{2}"),
    "GBNF grammar": Constraint(kind=ConstraintKind.GBNF, source=_SUM),
}


@dataclass(frozen=True, slots=True)
class MaskCost:
    """The cost of one constraint; `first_ms` is a model's first compile, with its tokens read."""

    name: str
    num_tokens: int
    median_us: float
    p99_us: float
    compile_ms: float
    first_ms: float


def vocabulary_of(model: Path) -> LlamaVocabulary:
    """The vocabulary of a GGUF file, never freed. Raises BenchError: it cannot be loaded."""
    start()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    handle = llama.llama_model_load_from_file(str(model).encode(), params)
    if not handle:
        raise BenchError(f"the vocabulary of {model} cannot be loaded")
    return LlamaVocabulary(handle)


def token_times_us(constraint: Constraint, compiler: GrammarCompiler, n_vocab: int, seed: int) -> list[float]:
    """Microseconds of each token of random texts that the constraint allows."""
    rng = np.random.default_rng(seed)
    times: list[float] = []
    while len(times) < NUM_TOKENS:
        state = compiler.state(constraint)
        for _ in range(MAX_TEXT_TOKENS):
            row = rng.standard_normal(n_vocab, dtype=np.float32)
            began_s = time.perf_counter()
            state.apply(row)
            masked_s = time.perf_counter()
            token = int(row.argmax())
            drawn_s = time.perf_counter()
            state.accept(token)
            is_complete = state.is_complete
            times.append(1e6 * (time.perf_counter() - drawn_s + masked_s - began_s))
            if is_complete:
                break
    return times


def measure(model: Path, seed: int = 1) -> list[MaskCost]:
    """The cost of each constraint on the tokens of `model`. Raises BenchError."""
    vocabulary = vocabulary_of(model)
    n_vocab = vocabulary.n_vocab
    costs = []
    for name, constraint in CONSTRAINTS.items():
        compiler = GrammarCompiler(lambda: GrammarTokenizer(vocabulary, n_vocab))
        first_ms = _time_ms(compiler, constraint)
        tokenizer = compiler.compile(constraint).tokenizer
        compiles = []
        for _ in range(NUM_COMPILES):
            began_s = time.perf_counter()
            compile_grammar(constraint, tokenizer)
            compiles.append(1e3 * (time.perf_counter() - began_s))
        times = token_times_us(constraint, compiler, n_vocab, seed)
        p99_us = quantiles(times, n=100)[-1]
        costs.append(MaskCost(name, len(times), median(times), p99_us, median(compiles), first_ms))
    return costs


def _time_ms(compiler: GrammarCompiler, constraint: Constraint) -> float:
    began_s = time.perf_counter()
    compiler.compile(constraint)
    return 1e3 * (time.perf_counter() - began_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the costs, as text or as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.mask_cost", description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        costs = measure(options.model)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return 0
    for cost in costs:
        print(
            f"{cost.name}: {cost.median_us:.0f} us a token (p99 {cost.p99_us:.0f}), "
            f"compiled in {cost.compile_ms:.1f} ms, the first of a model in {cost.first_ms:.0f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
