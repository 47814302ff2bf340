"""Native vocabularies of every type: what ends a text, how few tokens a long one has, where it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from smol_vocabulary import vocabulary as smol_vocabulary
from stoker.backends.llama.binding import llama
from stoker.backends.llama.text import vocabulary as vocabularies
from stoker.backends.llama.text.cuts import MAX_RUN_CHARS
from stoker.backends.llama.text.vocabulary import LlamaVocabulary
from stoker.backends.token_floor import TokenFloor
from tiny_vocabularies import SPECIALS, TINY_VOCABULARIES, byte_pairs, opened, write

PARTS = [
    *("<|im_start|>", "<|im_end|>", "<|a|>", "|><|", "<s>", "</s>"),
    *("<mask>", "[MASK]", "[CLS]", "<|endoftext|>"),
    *(
        "<|im_start|><|im_end|>",
        "<|<|im_start|>|>",
        "<",
        "|",
        ">",
        "the",
        " the",
        "hello world",
        "THE",
        "ing",
    ),
    *(" ", "  ", "\n", "\t", " \n ", "a", "aaaa", "=", "12345", "!?"),
    *("ß", "中文", "é", "e\u0301", "\u200b", "\ufeff", "▁"),
]
NAMES = ["SmolLM2's", *TINY_VOCABULARIES]

VocabularyOf = Callable[[str], LlamaVocabulary]


@pytest.fixture(scope="module")
def vocabulary_of(tmp_path_factory: pytest.TempPathFactory) -> VocabularyOf:
    """Vocabularies by name, each opened once."""
    folder, known = tmp_path_factory.mktemp("vocabularies"), {"SmolLM2's": smol_vocabulary()}

    def find(name: str) -> LlamaVocabulary:
        if name not in known:
            pieces = TINY_VOCABULARIES[name]() if name in TINY_VOCABULARIES else byte_pairs(name)
            known[name] = opened(write(folder / f"{len(known)}.gguf", pieces))
        return known[name]

    return find


def text_of(random: Random, num_parts: int) -> str:
    """A text in which some parts are much more frequent than others."""
    weights = [random.random() ** 4 for _ in PARTS]
    parts = random.choices(PARTS, weights, k=num_parts)
    return "".join(part * random.choice((1, 1, 1, 2, 7)) for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_never_has_fewer_tokens_than_its_bytes_tell(name: str, vocabulary_of: VocabularyOf) -> None:
    """A text is refused by its length only where it has more tokens for sure."""
    vocabulary, random = vocabulary_of(name), Random(7)
    for _ in range(150):
        text = text_of(random, random.choice((1, 3, 30, 300)))
        for parse_special in (True, False):
            tokens = vocabulary.tokenize(text, add_special=False, parse_special=parse_special)
            assert vocabulary.least_tokens(text, 2**30) <= len(tokens), text


@pytest.mark.parametrize("name", NAMES)
def test_plain_words_have_tokens_in_proportion_to_their_length(
    name: str, vocabulary_of: VocabularyOf
) -> None:
    """The bound says something: of thirty megabytes of words it is never nothing."""
    vocabulary = vocabulary_of(name)
    text = "the hello and a 12345 of that " * 1000
    assert vocabulary.least_tokens(text, 2**30) >= len(text) / 40


def test_counting_ends_where_there_are_enough() -> None:
    """A text of thirty megabytes is not read to its end to say that it is too long."""
    vocabulary = smol_vocabulary()
    text = "the brown fox " * 1_000_000
    assert 1000 < vocabulary.least_tokens(text, 1000) < vocabulary.least_tokens(text, 100_000)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_that_the_library_ends_a_generation_at_is_known(
    name: str, vocabulary_of: VocabularyOf
) -> None:
    """SPEC D4: as if it were asked of each of them."""
    _assert_knows_its_ends(vocabulary_of(name))


@pytest.mark.parametrize("end", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_plain_token_that_the_file_names_as_an_end_is_one(end: str, tmp_path: Path) -> None:
    """SPEC D4: nothing in its spelling or its flags says so."""
    pieces = byte_pairs()
    named = len(pieces.tokens) - len(SPECIALS) - 1
    file = write(tmp_path / "v.gguf", replace(pieces, ids={**pieces.ids, end: named}))
    vocabulary = opened(file)
    assert named in vocabulary.eog_tokens
    _assert_knows_its_ends(vocabulary)


def _assert_knows_its_ends(vocabulary: LlamaVocabulary) -> None:
    is_end = [
        bool(llama.llama_vocab_is_eog(vocabulary._handle, token)) for token in range(vocabulary.n_vocab)
    ]
    assert vocabulary.eog_tokens == tuple(token for token, ends in enumerate(is_end) if ends)


def test_the_tables_of_a_vocabulary_are_read_while_its_load_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L10: whoever needs them first waits for the one reading; the model is freed after it."""
    begun, goes_on, calls, read = Event(), Event(), [], vocabularies._tables_of

    def read_slowly(*of: Any) -> Any:
        calls.append(of)
        begun.set()
        assert goes_on.wait(60)
        return read(*of)

    monkeypatch.setattr(vocabularies, "_tables_of", read_slowly)
    vocabulary = opened(write(tmp_path / "v.gguf", byte_pairs()))
    assert not begun.is_set(), "beside a load's own Python both would wait for each other"
    vocabulary.read_ahead()
    vocabulary.read_ahead()
    assert begun.wait(60)
    with ThreadPoolExecutor(2) as pool:
        ends, closing = pool.submit(lambda: vocabulary.eog_tokens), pool.submit(vocabulary.close)
        assert not ends.done()
        assert not closing.done()
        goes_on.set()
        assert ends.result(60)
        closing.result(60)
    assert len(calls) == 1


def test_tables_that_cannot_be_read_are_told_of_to_whoever_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L10: reading ahead has no one to tell."""

    def fail(*_of: Any) -> Any:
        raise MemoryError("no room for tables")

    monkeypatch.setattr(vocabularies, "_tables_of", fail)
    vocabulary = opened(write(tmp_path / "v.gguf", byte_pairs()))
    vocabulary.read_ahead()
    vocabulary.close()
    with pytest.raises(MemoryError, match="no room for tables"):
        _ = vocabulary.eog_tokens


def test_long_texts_that_come_at_once_have_the_vocabulary_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC Q21: threads that read it side by side took seconds: each kept the other from going on."""
    vocabulary, read = opened(write(tmp_path / "v.gguf", byte_pairs())), vocabularies.floor_of
    num_asking, all_ask, readings = 4, Event(), list[int]()
    asking = list[int]()

    def slow(*given: Any) -> TokenFloor:
        readings.append(1)
        assert all_ask.wait(60), "nobody else asks"
        return read(*given)

    def ask(number: int) -> int:
        asking.append(number)
        if len(asking) == num_asking:
            all_ask.set()
        return vocabulary.least_tokens("the hello " * 1000, 2**30)

    monkeypatch.setattr(vocabularies, "floor_of", slow)
    with ThreadPoolExecutor(num_asking) as pool:
        counts = set(pool.map(ask, range(num_asking)))
    assert (len(counts), len(readings)) == (1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_texts_full_of_control_tokens_are_cut_and_read_as_the_whole(
    name: str, vocabulary_of: VocabularyOf
) -> None:
    """Cuts before control tokens change nothing: what strips, overlaps or adds blanks included."""
    vocabulary, random, num_cut = vocabulary_of(name), Random(11), 0
    for _ in range(8):
        text = text_of(random, 3000)
        for add_special, parse_special in ((True, True), (False, True), (True, False)):
            num_cut += len(vocabulary._tables.cuts.pieces(text, parse_special=parse_special)) > 1
            whole = vocabulary._native_tokens(
                text.encode(), add_special=add_special, parse_special=parse_special
            )
            assert vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special) == whole
    assert num_cut or name == "word pieces", "nothing was cut"


def test_many_control_tokens_are_looked_for_in_short_pieces() -> None:
    """The native search is quadratic in their number: 1.8 MB of them took 37 s."""
    pieces = smol_vocabulary()._tables.cuts.pieces("<|im_start|>" * 150_000, parse_special=True)
    assert max(map(len, pieces)) < 2 * 4096
    assert "".join(pieces) == "<|im_start|>" * 150_000


@pytest.mark.parametrize("unit", ["a", "A", "中", " ", "=", "1", "\n", "\u0301", "a\u0301"], ids=repr)
def test_a_long_run_is_cut_and_the_text_around_it_is_read_as_it_would_be(
    unit: str, vocabulary_of: VocabularyOf
) -> None:
    """Only the run itself is read in pieces; every byte of it is still there."""
    vocabulary = vocabulary_of("gpt-4o")
    before, after = "hello the world, ", "! the hello\nand so on 12"
    text = before + unit * (3 * MAX_RUN_CHARS // len(unit)) + after
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    assert b"".join(map(vocabulary.special_piece, tokens)) == text.encode()
    alone = vocabulary.tokenize(before, add_special=False, parse_special=True)
    assert tokens[: len(alone) - 2] == alone[:-2]  # a blank before the run may be its first
    ending = vocabulary.tokenize(after, add_special=False, parse_special=True)
    assert tokens[-len(ending) + 2 :] == ending[2:]


def test_a_text_without_long_runs_is_read_whole(vocabulary_of: VocabularyOf) -> None:
    """Prose, minified JSON and base64 are tokenised as llama.cpp does, however long they are."""
    vocabulary = vocabulary_of("gpt-4o")
    prose = "The quick brown fox jumps over the lazy dog, and that is it.\n" * 400
    dense = '{"a":[1,2,{"bc":"de"}],"f":true},' * 800 + "aB3dE6fG9h" * 2000
    for text in (prose, dense):
        assert vocabulary._tables.cuts.pieces(text, parse_special=True) == [text]


# What `tokenizer.ggml.pre` may say of how a text is split into words, without other names of the same.
SPLITTINGS = """
    afmoe bailingmoe bloom chameleon chatglm-bpe command-r dbrx deepseek-coder deepseek-llm deepseek-v3
    default exaone exaone-moe falcon gpt-2 gpt-4o granite-embed-multi-97m grok-2 hunyuan-dense hy_v4 jais-2
    joyai-llm kimi-k2 laguna llama-bpe minicpm5 minimax-m2 mpt olmo poro-chat qwen2 qwen35 refact seed-coder
    smaug-bpe smollm spark2_5 stablelm2 starcoder superbpe tekken tiny_aya trillion ufakzeka viking youtu
"""
RUNS = ["a", "A", "中", " ", "=", "!", "\n", "a ", "\u0301", "a\u0301", "!\n", "aA1!", "\t ", "/", "aA"]
_CHILD = """
import sys, threading
from pathlib import Path
from tiny_vocabularies import opened

def read(path, run):
    print(path.stem, repr(run), flush=True)
    text = "so " + run * (20_000 // len(run)) + " end"
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    assert b"".join(map(vocabulary.piece, tokens)) == text.encode()
    told.append(run)

threading.stack_size(4 * 2**20)  # a quarter of what preparing threads have: enough for 13,000 uncut
for path in map(Path, sys.argv[1:]):
    vocabulary, told = opened(path), []
    for run in {runs!r}:
        thread = threading.Thread(target=read, args=(path, run))
        thread.start()
        thread.join()
    assert told == {runs!r}
print("done")
"""


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 48, 12))
def test_no_run_ends_the_process_whatever_splits_words(first: int, tmp_path: Path) -> None:
    """std::regex recurses once a character: a hundred thousand without a blank ended the engine.

    In a child process, so that a crash fails the test alone.
    """
    names = SPLITTINGS.split()[first : first + 12]
    files = [str(write(tmp_path / f"{name}.gguf", byte_pairs(name))) for name in names]
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(runs=RUNS), *files],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.splitlines()
    assert done.returncode == 0, f"ended with {done.returncode} at {told[-1:]}: {done.stderr[-600:]}"
    assert told[-1] == "done"
