"""Encoders through llama.cpp: vectors against numpy's, one text against many, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import minilm
from bert_reference import BertReference, cosine
from stoker.backends.llama.oneshot import encoder as encoders
from stoker.backends.llama.oneshot.encoder import MAX_TEXTS, load
from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelSpec
from stoker.wording import params_text
from tiny_models import BERT_CONTEXT_LENGTH, WIDTH, write_bert, write_llama

TEXTS = ["a", "hello", "the quick brown fox jumps", "0123456789", "one, two, three!", "", "z" * 20]
ENOUGH = 0.9999


def encoder_of(path: Path, **spec):
    """A loaded encoder; close it."""
    return load(ModelSpec(**{"id": "e", "path": str(path), "num_threads": 1, "n_batch": 128} | spec))


def tokens_of(encoder, texts):
    """The texts as the engine would tokenise them."""
    return [encoder.vocabulary.tokenize(text, add_special=True, parse_special=True) for text in texts]


@pytest.mark.long
@pytest.mark.parametrize(("pooling", "number"), [("mean", 1), ("cls", 2), ("last", 3)])
def test_a_vector_is_what_bert_gives(tmp_path, pooling, number):
    """SPEC K2: mean, cls and last, against a computation of our own in double precision."""
    path = write_bert(tmp_path / "bert.gguf", pooling=number)
    reference = BertReference(path)
    with encoder_of(path) as encoder:
        assert encoder.pooling == pooling
        for tokens in tokens_of(encoder, TEXTS):
            (vector,) = encoder.encode([tokens])
            assert vector.shape == (encoder.n_embd,) == (WIDTH,)
            assert cosine(vector, reference.vector(tokens, pooling)) >= ENOUGH


@pytest.mark.parametrize("number", [None, 0])
def test_where_the_file_names_no_pooling_it_is_the_mean_and_that_is_said(tmp_path, number, caplog):
    """SPEC K2: one vector a text is what is served."""
    path = write_bert(tmp_path / "bert.gguf", pooling=number)
    with encoder_of(path) as encoder:
        (tokens,) = tokens_of(encoder, ["hello"])
        assert encoder.pooling == "mean"
        assert "names no pooling" in caplog.text
        assert cosine(encoder.encode([tokens])[0], BertReference(path).vector(tokens)) >= ENOUGH


def test_a_vector_does_not_depend_on_the_texts_beside_it(tmp_path):
    """SPEC K2, Q9: alone, in any order and beside any others a text has the same vector."""
    with encoder_of(write_bert(tmp_path / "bert.gguf")) as encoder:
        texts = tokens_of(encoder, TEXTS)
        alone = [encoder.encode([text])[0] for text in texts]
        for order in (range(len(texts)), reversed(range(len(texts)))):
            places = list(order)
            for place, vector in zip(places, encoder.encode([texts[at] for at in places]), strict=True):
                assert cosine(vector, alone[place]) >= ENOUGH
                assert np.abs(vector - alone[place]).max() < 1e-3 * np.abs(alone[place]).max()


def test_what_a_captured_graph_gives_that_is_no_number_is_computed_once_more(tmp_path, monkeypatch, caplog):
    """B7: in a context that has captured nothing; what is not captured is given as it is."""
    with encoder_of(write_bert(tmp_path / "bert.gguf")) as encoder:
        texts = tokens_of(encoder, TEXTS)
        expected, sound, opened, renew = encoder.encode(texts), encoder._encode, [], encoder._open
        monkeypatch.setattr(encoder, "_open", lambda: opened.append(renew()))
        monkeypatch.setattr(
            encoder, "_encode", lambda texts: sound(texts) * np.float32(1 if opened else np.nan)
        )
        monkeypatch.setattr(encoders, "captures_graphs", lambda: True)
        assert np.isnan(encoder.encode(texts)).all()
        monkeypatch.setattr(encoder._model, "devices", ("a card",))
        assert np.array_equal(encoder.encode(texts), expected)
        assert opened
        monkeypatch.undo()
    assert "computed once more" in caplog.text


def test_as_many_texts_as_it_says_and_the_longest_one_fit(tmp_path):
    """SPEC K7: the limits it reports are those it takes; a text may be longer than a batch."""
    path = write_bert(tmp_path / "bert.gguf")
    reference = BertReference(path)
    with encoder_of(path, n_batch=16) as encoder:
        limits = encoder.capabilities
        assert limits.description == f"bert {params_text(limits.num_params)} F32"
        assert (limits.n_ctx, limits.n_batch, limits.num_sequences) == (BERT_CONTEXT_LENGTH, 16, 16)
        longest = [2, *[10 + at % 30 for at in range(limits.n_ctx - 2)], 3]
        assert cosine(encoder.encode([longest])[0], reference.vector(longest)) >= ENOUGH
        for vector in encoder.encode([[7]] * limits.num_sequences):
            assert cosine(vector, reference.vector([7])) >= ENOUGH
    with encoder_of(path, n_batch=512, n_ctx=32) as encoder:
        assert (encoder.capabilities.n_ctx, encoder.capabilities.num_sequences) == (32, MAX_TEXTS)


def test_it_says_what_it_holds_and_keeps_count_of_threads(tmp_path):
    """SPEC K7, C14, M7: bytes by line, more of them once a call was made; threads can change at any time."""
    with encoder_of(write_bert(tmp_path / "bert.gguf")) as encoder:
        before = encoder.memory()
        encoder.set_threads(2)
        encoder.encode([[2, 10, 3]])
        after = encoder.memory()
        assert set(before) == {"weights", "compute"}
        assert before["weights"] == after["weights"] > 0
        assert after["compute"] > before["compute"] > 0
        assert encoder.num_threads == 2


def test_a_decoder_is_no_encoder_and_a_closed_one_stays_closed(tmp_path):
    """SPEC K1: the wrong class is refused before any load; closing twice is no fault."""
    encoder = encoder_of(write_bert(tmp_path / "bert.gguf"))
    encoder.close()
    encoder.close()
    with pytest.raises(UnsupportedError, match="no encoder"):
        encoder_of(write_llama(tmp_path / "llama.gguf"))


@pytest.fixture(scope="module")
def minilm_file(tmp_path_factory):
    """all-MiniLM-L6-v2, converted."""
    place = minilm.source()
    if place is None:
        pytest.skip(f"{minilm.PACKAGE} is not installed and {minilm.VARIABLE} names no wheel")
    return minilm.convert(place, tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2.gguf")


@pytest.mark.slow
def test_minilm_gives_its_own_vectors_and_knows_what_is_alike(minilm_file):
    """SPEC K2: a real encoder, against numpy; a paraphrase is nearer than another subject."""
    reference = BertReference(minilm_file)
    texts = ["A man is eating food.", "A man eats something.", "The stock market fell sharply today."]
    with encoder_of(minilm_file, n_batch=512, num_threads=1) as encoder:
        tokens = tokens_of(encoder, texts)
        assert tokens[0] == [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]  # as BERT's own tokenizer has it
        vectors = encoder.encode(tokens)
        for text, vector in zip(tokens, vectors, strict=True):
            assert cosine(vector, reference.vector(text)) >= ENOUGH
        assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2]) + 0.4
