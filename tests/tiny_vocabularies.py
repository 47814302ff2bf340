"""Writes vocabularies of every type that llama.cpp has, a few hundred tokens each, without any weights.

`opened` has the native library read one; it is kept for as long as the process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf

from stoker.backends.llama.binding import llama, start
from stoker.backends.llama.text.vocabulary import LlamaVocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<|a|>": USER_DEFINED,
    "|><|": USER_DEFINED,
    "|><|im_start|>": CONTROL,  # longer than what it overlaps: it is found first
    "  ": USER_DEFINED,
}
WORDS = ["the", "and", "ing", "aaaa", "====", "    ", "\n\n", "hello", "world", "ß", "中文", "é"]


@dataclass
class Pieces:
    """What a vocabulary is made of: (spelling, type) of each token, and keys of the file."""

    model: str
    tokens: list[tuple[str, int]]
    pre: str = "default"
    name: str = "tiny"
    merges: Sequence[str] = ()
    ids: Mapping[str, int] = field(default_factory=dict)
    adds: Mapping[str, bool] = field(default_factory=dict)


def write(path: Path, pieces: Pieces) -> Path:
    """A file of a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(pieces.name)
    writer.add_tokenizer_model(pieces.model)
    writer.add_tokenizer_pre(pieces.pre)
    writer.add_token_list([text for text, _ in pieces.tokens])
    writer.add_token_types([kind for _, kind in pieces.tokens])
    writer.add_token_scores([-float(len(pieces.tokens)) / len(text) for text, _ in pieces.tokens])
    if pieces.merges:
        writer.add_token_merges(pieces.merges)
    for key, value in pieces.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    for key, value in pieces.adds.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path) -> LlamaVocabulary:
    """The vocabulary of a file."""
    start()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} is refused"
    return LlamaVocabulary(model)


# ---------------------------------------------------------------- byte pairs


def _letters() -> dict[int, str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + at) for at, b in enumerate(others)}


LETTERS = _letters()


def _merged(texts: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Tokens and merges that build each text from its letters, the first two first."""
    tokens: dict[str, None] = {}
    merges: dict[str, None] = {}
    for letters in texts:
        for at in range(1, len(letters)):
            merges["".join(letters[:at]) + " " + letters[at]] = None
            tokens["".join(letters[: at + 1])] = None
    return list(tokens), list(merges)


def byte_pairs(pre: str = "gpt-2", *, name: str = "tiny", extra: Sequence[str] = ()) -> Pieces:
    """As GPT-2's: bytes have letters of their own."""
    tokens, merges = _merged([[LETTERS[byte] for byte in word.encode()] for word in (*WORDS, " the", " a")])
    specials = SPECIALS | dict.fromkeys(extra, CONTROL)
    listed = [(letter, NORMAL) for letter in LETTERS.values()]
    listed += [(token, NORMAL) for token in tokens] + list(specials.items())
    end = len(listed) - len(specials)
    return Pieces("gpt2", listed, pre, name, merges, {"bos": end, "eos": end + 1}, {"add_bos_token": True})


def raw_pairs() -> Pieces:
    """As Gemma 4's: blanks are escaped, bytes are spelled."""
    words = [list(word.replace(" ", "▁")) for word in WORDS if "\n" not in word]
    tokens, merges = _merged(words)
    singles = {letter for word in words for letter in word} | {"▁", *"abcdefghijklmnopqrstuvwxyz"}
    listed = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), *((each, BYTE) for each in BYTES)]
    listed += [(each, NORMAL) for each in sorted(singles | set(tokens))] + [("<|im_start|>", CONTROL)]
    return Pieces("gemma4", listed, "gemma4", merges=merges, ids={"bos": 2, "eos": 1})


# ---------------------------------------------------------------- others


def sentence_pieces(*, name: str = "tiny", has_prefix: bool = True) -> Pieces:
    """As Llama's: the blank before a text is added."""
    words = [word.replace(" ", "▁") for word in (*WORDS, " the", " hello")]
    parts = {word[:end] for word in words for end in range(1, len(word) + 1)} | {"▁", *"abcdefghijklmno"}
    listed = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|endoftext|>", CONTROL)]
    listed += [(each, BYTE) for each in BYTES] + [(each, NORMAL) for each in sorted(parts)]
    listed += list(SPECIALS.items())
    ids = {"unknown": 0, "bos": 1, "eos": 2}
    adds = {"add_bos_token": True, "add_eos_token": True, "add_space_prefix": has_prefix}
    return Pieces("llama", listed, name=name, ids=ids, adds=adds)


def unigrams() -> Pieces:
    """As T5's: blanks are merged, unknown characters taken together."""
    listed = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN), ("▁", NORMAL)]
    listed += [(each, NORMAL) for each in "abcdefghijklmnopqrstuvwxyz0123456789.,!?"]
    listed += [(word, NORMAL) for word in ("▁the", "hello", "▁hello", "ing", "aaaa")] + [
        ("<extra>", USER_DEFINED)
    ]
    ids = {"padding": 0, "eos": 1, "unknown": 2}
    adds = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": True}
    return Pieces("t5", listed, ids=ids, adds=adds | {"remove_extra_whitespaces": True})


def word_pieces() -> Pieces:
    """As BERT's: a word without pieces is one unknown token."""
    listed = [
        ("[PAD]", CONTROL),
        ("[UNK]", UNKNOWN),
        ("[CLS]", CONTROL),
        ("[SEP]", CONTROL),
        ("[MASK]", CONTROL),
    ]
    listed += [(f"▁{each}", NORMAL) for each in "abcdefghij.,!=<"] + [(each, NORMAL) for each in "abcdefghij"]
    listed += [("▁the", NORMAL), ("▁hello", NORMAL), ("aaaa", NORMAL)]
    ids = {"padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "mask": 4}
    return Pieces("bert", listed, ids=ids)


def bytes_and_words() -> Pieces:
    """As RWKV's: bytes, and words found from the left."""
    listed = [("<s>", CONTROL)] + [(f"\\x{byte:02x}", NORMAL) for byte in range(256)]
    return Pieces(
        "rwkv", listed + [(word.replace("\n", "\\n"), NORMAL) for word in WORDS] + [("<|im_start|>", CONTROL)]
    )


TINY_VOCABULARIES: Mapping[str, Callable[[], Pieces]] = {
    "byte pairs": byte_pairs,
    "byte pairs, split by std::regex": lambda: byte_pairs("falcon"),
    "byte pairs that strip to the left": lambda: byte_pairs("jina-v2-de", extra=["<mask>"]),
    "raw byte pairs": raw_pairs,
    "sentence pieces": sentence_pieces,
    "sentence pieces without a prefix": lambda: sentence_pieces(has_prefix=False),
    "sentence pieces that strip to the right": lambda: sentence_pieces(name="Phi-3 tiny"),
    "unigrams": unigrams,
    "word pieces": word_pieces,
    "bytes and words": bytes_and_words,
}
