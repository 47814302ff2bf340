"""Rerankers through llama.cpp: scores against numpy's and against the library driven by hand."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from bert_reference import BertReference
from real_models import RERANKER
from stoker.backends.llama.oneshot.encoder import LIKE_ALONE_TOKENS, calls_of, load
from stoker.ipc.model import ModelSpec
from stoker.runtime import Runtime
from stoker.tasks.rerank import rank_documents
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
LONG = " ".join(_WORDS * 6)  # from 64 tokens on attention adds up in another way


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A trained reranker where somebody has one, else one of random weights."""
    made = tmp_path_factory.mktemp("rank") / "rank.gguf"
    return RERANKER if RERANKER.is_file() else write_bert(made, pooling=4, context=512)


def reranker_of(path, **spec):
    """A loaded reranker; close it."""
    return load(ModelSpec(**{"id": "r", "path": str(path), "num_threads": 1, "n_batch": 256} | spec))


def lists():
    """Queries, each with documents of various lengths."""
    chance = random.Random(7)

    def text(most):
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, most)))

    return [(text(5), [text(20) for _ in range(chance.randint(3, 8))]) for _ in range(NUM_LISTS)]


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


@pytest.mark.long
def test_fifty_lists_come_in_the_order_of_llama_cpp_itself(model_path):
    """SPEC K4: the library driven by hand gives the same numbers: to the bit where weights are quantised.

    With weights in f32 one text and several take different kernels, which differ in the last digit.
    """
    last_digit = 0.0 if model_path == RERANKER else 1e-6
    reference = Reference(model_path)
    try:
        with reranker_of(model_path, n_batch=4096) as encoder:
            for query, documents in lists():
                given = [*documents, documents[0], f"{documents[0]} {LONG}", f"{documents[1]} {LONG}"]
                expected = [reference.score(query, document) for document in given]
                pairs = [encoder.vocabulary.pair(query, document) for document in given]
                assert encoder.encode(pairs)[:, 0].tolist() == pytest.approx(expected, rel=0, abs=last_digit)
    finally:
        reference.close()


def test_short_texts_share_native_calls_and_long_ones_go_alone():
    """SPEC K4: in order, none left out; what is computed as if alone is not more than so many tokens."""
    for lengths in ([5], [63], [64], [63, 1], [20, 20, 20, 20], [10, 200, 10, 53, 1], [64, 64], [30] * 9):
        calls = calls_of(lengths, LIKE_ALONE_TOKENS)
        assert [length for call in calls for length in lengths[call]] == lengths
        for call in calls:
            assert len(lengths[call]) == 1 or sum(lengths[call]) <= LIKE_ALONE_TOKENS
    assert len(calls_of([10] * 12, 63)) == 2
    assert len(calls_of([10] * 12, 512)) == 1


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
        found = await rank_documents(runtime, query, documents)
    assert [each.score for each in found.results] == sorted(expected, reverse=True)
    assert [expected[each.index] for each in found.results] == sorted(expected, reverse=True)
