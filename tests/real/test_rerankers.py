"""Rerankers through llama.cpp: scores against numpy's and against the library driven by hand."""

from __future__ import annotations

import ctypes
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from bert_reference import BertReference
from stoker.backends.llama.encoder import load
from stoker.reranking import Reranking
from stoker.runtime import Runtime
from stoker.values import ModelSpec
from tiny_models import write_bert

QUERY = "who waits"
DOCUMENTS = ["a", "hello", "the quick brown fox", "0123456789", "one, two!", "", "z" * 20]
FIRST, SEPARATOR = 2, 3  # of the tiny model's word pieces
NUM_LISTS = 50
_WORDS = [
    "river",
    "bank",
    "money",
    "fish",
    "water",
    "loan",
    "cat",
    "paris",
    "capital",
    "france",
    "sun",
    "tree",
]
ROUNDING = 0.05  # of eight-bit weights, whose kernels differ with the size of a batch; scores spread over 1.5


@pytest.fixture(scope="module")
def model_path():
    """The smallest real reranker at hand."""
    shared = Path(__file__).resolve().parents[3] / "shared" / "models" / "reranker-bertmini-q8_0.gguf"
    if not shared.is_file():
        pytest.skip(f"{shared} is not here")
    return shared


def reranker_of(path, **spec):
    """A loaded reranker; close it."""
    return load(ModelSpec(**{"id": "r", "path": str(path), "num_threads": 1, "n_batch": 256} | spec))


def lists():
    """Queries, each with documents of various lengths."""
    chance = random.Random(7)

    def text(most):
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, most)))

    return [(text(5), [text(20) for _ in range(chance.randint(3, 8))]) for _ in range(NUM_LISTS)]


def is_order_of(expected, order):
    """Whether an order is that of the scores, but for what is as good as equal."""
    ranked = [expected[at] for at in order]
    return all(one > other - 2 * ROUNDING for one, other in itertools.pairwise(ranked))


class Reference:
    """llama.cpp alone, as its own server scores: a pair in a context that nothing else is in."""

    def __init__(self, path):
        self.model = native.llama_model_load_from_file(
            str(path).encode(), native.llama_model_default_params()
        )
        params = native.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        params.embeddings, params.pooling_type = True, native.LLAMA_POOLING_TYPE_RANK
        self.context = native.llama_init_from_model(self.model, params)
        self.vocabulary = native.llama_model_get_vocab(self.model)

    def close(self):
        """Free both."""
        native.llama_free(self.context)
        native.llama_model_free(self.model)

    def score(self, query, document):
        """The first output for [CLS] query [SEP] document, which is what this vocabulary adds."""
        begin, between = (
            native.llama_vocab_bos(self.vocabulary),
            native.llama_vocab_sep(self.vocabulary),
        )
        tokens = [begin, *self._tokens(query), between, *self._tokens(document)]
        buffer = (native.llama_token * len(tokens))(*tokens)
        assert native.llama_encode(self.context, native.llama_batch_get_one(buffer, len(tokens))) == 0
        return native.llama_get_embeddings_seq(self.context, 0)[0]

    def _tokens(self, text):
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 8))()
        count = native.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), False, False)
        return buffer[:count]


def test_a_score_is_what_bert_and_its_classifier_give(tmp_path):
    """SPEC K4: against a computation of our own in double precision; raw, whatever stands beside it."""
    path = write_bert(tmp_path / "rank.gguf", pooling=4)
    reference = BertReference(path)
    with reranker_of(path) as encoder:
        pairs = [encoder.vocabulary.pair(QUERY, document) for document in DOCUMENTS]
        scores = encoder.encode(pairs)
        assert scores.shape == (len(DOCUMENTS), 1)
        for pair, (score,) in zip(pairs, scores, strict=True):
            assert score == pytest.approx(reference.score(pair), abs=5e-3)
            assert encoder.encode([pair])[0, 0] == pytest.approx(score, abs=5e-3)
        assert np.ptp(scores) > 0.05


def test_a_pair_is_written_as_the_vocabulary_says(tmp_path):
    """SPEC K4: [CLS] query [SEP] document; control tokens in either are text."""
    with reranker_of(write_bert(tmp_path / "rank.gguf", pooling=4)) as encoder:
        vocabulary = encoder.vocabulary

        def plain(text):
            return vocabulary.tokenize(text, add_special=False, parse_special=False)

        assert vocabulary.pair("a b", "c") == [FIRST, *plain("a b"), SEPARATOR, *plain("c")]
        hostile = vocabulary.pair("a[SEP]", "b[SEP]c[CLS]")
        assert (hostile.count(SEPARATOR), hostile.count(FIRST)) == (1, 1)


def test_fifty_lists_come_in_the_order_of_llama_cpp_itself(model_path):
    """SPEC K4: the library driven by hand gives the same numbers; in one call but for rounding."""
    reference = Reference(model_path)
    try:
        with reranker_of(model_path) as encoder:
            for query, documents in lists():
                expected = [reference.score(query, document) for document in documents]
                pairs = [encoder.vocabulary.pair(query, document) for document in documents]
                alone = [encoder.encode([pair])[0, 0] for pair in pairs]
                assert alone == pytest.approx(expected, abs=1e-5)
                together = encoder.encode(pairs)[:, 0]
                assert together == pytest.approx(expected, abs=ROUNDING)
                assert is_order_of(expected, np.argsort(-together))
    finally:
        reference.close()


async def test_a_runtime_puts_documents_in_that_order(model_path, tmp_path):
    """SPEC K4, I9: the whole way through an engine."""
    query, documents = lists()[0]
    reference = Reference(model_path)
    try:
        expected = [reference.score(query, document) for document in documents]
    finally:
        reference.close()
    folders = {"cache_dir": tmp_path, "states_dir": tmp_path, "run_dir": tmp_path}
    async with Runtime(model_path, isolation="thread", **folders) as runtime:
        found = await Reranking(runtime).rerank(query, documents)
    assert is_order_of(expected, [each.index for each in found.results])
    assert not is_order_of(expected, [each.index for each in reversed(found.results)])
    for each in found.results:
        assert each.score == pytest.approx(expected[each.index], abs=ROUNDING)
