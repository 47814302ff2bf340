"""The tokenizer of a folder: the same ids as the same vocabulary in a GGUF file, and bytes of every kind."""

import random
import unicodedata

import pytest

from model_folders import smollm2_config, smollm2_tokenizer, tiny_folder, write_tokenizer
from stoker.backends.mlx.text.vocabulary import FolderVocabulary
from stoker.errors import InvalidRequestError, ModelFileError
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.models.folders.config import FolderConfig
from stoker.models.folders.folder import ModelFolder
from stoker.models.folders.texts import read_texts

tokenizers = pytest.importorskip("tokenizers", reason="the extra mlx is not installed")

PARTS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>", "<reponame>"),
    *(" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\ufeff", "\x00", "\x7f", "\u2028"),
    *("'s", "'LL", "don't", "123", "\u0663", "\u00bd", "Ⅷ", "²", "_", "=", "====", "...", "$"),
    *(
        "é",
        "e\u0301",
        "ß",
        "İ",
        "🙂",
        "👩‍👩‍👧",
        "中文",
        "क्षि",
        "ไทย",
        "ﷺ",
        "\U0001d518",
        "ǆ",
        "a",
        "The",
        " the",
    ),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The vocabulary of SmolLM2 from a tokenizer.json that has no weights beside it."""
    path = smollm2_tokenizer(tmp_path_factory.mktemp("smollm2"))
    settings = FolderConfig(path / "config.json", smollm2_config())
    texts = read_texts(path, settings.document)
    return FolderVocabulary(
        ModelFolder(path=path, settings=settings, texts=texts, weight_files=(), tensors={})
    )


@pytest.fixture(scope="module")
def native():
    """The same vocabulary, read by llama.cpp."""
    from smol_vocabulary import vocabulary  # noqa: PLC0415 - loads native code

    return vocabulary()


def _drawn(rng):
    """A text of awkward parts and of characters that any table of Unicode knows."""
    letters = []
    while len(letters) < rng.randrange(1, 30):
        letter = chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x250, 0x2FFF)]))
        is_known = unicodedata.category(letter) not in {"Cn", "Cs", "Co"}
        letters.append(letter if is_known and rng.random() < 0.2 else rng.choice(PARTS))
    return "".join(letters)


@pytest.mark.long
def test_tokens_are_those_of_the_gguf_file(smollm2, native):
    """F3."""
    rng = random.Random(20)
    for _ in range(1500):
        text = _drawn(rng)
        for parse_special in (False, True):
            found = smollm2.tokenize(text, add_special=True, parse_special=parse_special)
            assert found == native.tokenize(text, add_special=True, parse_special=parse_special), repr(text)
            assert smollm2.least_tokens(text, 10_000) <= len(found), repr(text)


def test_pieces_and_ends_are_those_of_the_gguf_file(smollm2, native):
    """F3."""
    tokens = range(native.n_vocab)
    assert [smollm2.piece(token) for token in tokens] == [native.piece(token) for token in tokens]
    assert list(map(smollm2.special_piece, tokens)) == list(map(native.special_piece, tokens))
    assert smollm2.eog_tokens == native.eog_tokens
    assert (smollm2.added_bos, smollm2.bos_text, smollm2.eos_text) == (
        native.added_bos,
        native.bos_text,
        native.eos_text,
    )
    assert smollm2.chat_template == native.chat_template


def test_the_least_count_of_a_long_text_is_near_to_the_truth(smollm2):
    """D2."""
    text = "The quick brown fox jumps over 13 lazy dogs. " * 500
    count = len(smollm2.tokenize(text, add_special=False, parse_special=False))
    assert count / 4 < smollm2.least_tokens(text, count) <= count


def test_texts_that_are_no_unicode_are_refused(smollm2):
    """F3."""
    with pytest.raises(InvalidRequestError, match="Unicode"):
        smollm2.tokenize("\ud800", add_special=False, parse_special=True)


def test_grammars_take_the_vocabulary(smollm2):
    """F3."""
    grammar = GrammarTokenizer(smollm2, smollm2.n_vocab)
    assert b"".join(map(grammar.spelling, grammar.tokens_of('{"a": "é"}<|im_end|>'))).endswith(b"<|im_end|>")


# ---------------------------------------------------------------- other kinds

WORDS = ["hello world", "the lazy dog", "world of words", "aaaa bbbb"]


def _sentence_pieces():
    from tokenizers import Tokenizer, decoders, models, normalizers, processors  # noqa: PLC0415

    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd"]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(steps)
    found.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    return found


def _unigrams():
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: PLC0415

    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hello", -3.0)]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    found = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")])
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    return found


def _word_pieces():
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: PLC0415

    tokens = ["[UNK]", "<s>", "</s>", "hello", "##s", *"abcdefghijklmnopqrstuvwxyz"]
    tokens += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz"]
    found = Tokenizer(models.WordPiece({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))  # noqa: S106
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    found.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return found


def _opened(path, tokenizer, **texts):
    tiny_folder(path)
    tokenizer.save(str(path / "tokenizer.json"))
    folder = ModelFolder.open(path)
    document = dict(folder.config) | {"vocab_size": 400}
    return FolderVocabulary(
        ModelFolder(
            path=path,
            settings=FolderConfig(path / "config.json", document),
            texts=read_texts(path, document | texts),
            weight_files=folder.weight_files,
            tensors=folder.tensors,
        )
    )


@pytest.mark.parametrize(
    ("make", "text", "shown"),
    [
        (_sentence_pieces, "hello wörld 🙂\n", " hello wörld 🙂\n"),
        (_unigrams, "hello wörld 🙂 there", " hello wörld 🙂 there"),
        (_word_pieces, "hello hellos", " hello hellos"),
    ],
)
def test_pieces_of_every_kind_make_up_the_text(make, text, shown, tmp_path):
    """F3."""
    vocabulary = _opened(tmp_path / "model", make())
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(map(vocabulary.piece, tokens)).decode() == shown
    assert 0 < vocabulary.least_tokens(text * 50, 1000) <= 50 * len(tokens)
    with_end = vocabulary.tokenize(f"{text}</s>", add_special=False, parse_special=True)
    assert (vocabulary.piece(with_end[-1]), vocabulary.special_piece(with_end[-1])) == (b"", b"</s>")
    assert vocabulary.is_eog(with_end[-1])


@pytest.mark.parametrize(("adds", "added"), [(None, 1), (True, 1), (False, None)])
def test_the_flag_of_the_config_decides_over_the_template_of_the_tokenizer(adds, added, tmp_path):
    """F3."""
    path = tmp_path / "model"
    tiny_folder(path)
    tokenizer = _sentence_pieces()
    write_tokenizer(path, {}, flags={"bos_token": "<s>", "add_bos_token": adds})
    tokenizer.save(str(path / "tokenizer.json"))
    vocabulary = FolderVocabulary(ModelFolder.open(path))
    assert vocabulary.added_bos == added
    plain = vocabulary.tokenize("hello", add_special=False, parse_special=True)
    assert (
        vocabulary.tokenize("hello", add_special=True, parse_special=True) == [added][: bool(added)] + plain
    )


def test_a_token_without_a_row_is_refused_where_a_text_spells_it(tmp_path):
    """F3."""
    tokenizer = _sentence_pieces()
    tokenizer.add_special_tokens([f"<image_{number}>" for number in range(200)])
    vocabulary = _opened(tmp_path / "model", tokenizer)
    with pytest.raises(InvalidRequestError, match="image_199"):
        vocabulary.tokenize("<image_199>", add_special=False, parse_special=True)


@pytest.mark.parametrize("text", ['{"model": 1}', "{", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_tokenizer_that_is_none_is_a_typed_error(text, tmp_path):
    """F2."""
    path = tiny_folder(tmp_path / "model")
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        FolderVocabulary(ModelFolder.open(path))
