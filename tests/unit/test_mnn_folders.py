"""Folders of MNN's language models: which are whole, what they say of themselves, what they may not do."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from scripted_engine import model_info

from mnn_folders import FILES, IM_END, LAYERS, N_VOCAB, WIDTH, tiny_mnn_folder
from stoker.backends.mnn.binding import instructions
from stoker.backends.mnn.folder import MnnFolder
from stoker.backends.mnn.graph import read_graph
from stoker.backends.mnn.reader import open_model
from stoker.backends.mnn.tokenizer_file import TokenizerForm, read_head
from stoker.errors import ModelFileError, UnsupportedError
from stoker.images.turns import require_vision
from stoker.ipc.model import ModelClass, ModelSpec

NUM_MUTATIONS = 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is wrong."""
    return tiny_mnn_folder(tmp_path_factory.mktemp("whole") / "tiny-mnn")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def changed(file: Path, **settings: object) -> None:
    """Put other settings into a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_whole_folder_says_what_it_holds(whole: Path) -> None:
    """X1, SPEC K1: described and estimated by its files alone."""
    reader = open_model(str(whole))
    found = reader.describe()
    assert (found.model_class, found.architecture, found.name) == (ModelClass.DECODER, "llama", "tiny-mnn")
    assert found.max_slots == 1
    assert (found.n_vocab, found.n_embd) == (N_VOCAB, WIDTH)
    assert (found.n_ctx_train, found.has_fixed_context) == (0, False)
    assert found.eos_text == "<|im_end|>"
    assert "<|im_start|>" in str(found.chat_template)
    folder = MnnFolder.open(whole)
    assert folder.num_layers == LAYERS
    assert folder.head.ends == (IM_END, IM_END + 1)
    spec = ModelSpec(id="m", path=str(whole), n_ctx=1000)
    assert reader.estimator()(spec).lines["kv"] == 1000 * 2 * LAYERS * 32 * 4
    assert reader.estimator()(spec).lines["weights"] == folder.size_bytes - sum(
        (whole / name).stat().st_size for name in ("config.json", "tokenizer.txt", "embeddings_bf16.bin")
    )


@pytest.mark.parametrize("name", FILES)
def test_each_missing_file_is_named(folder: Path, name: str) -> None:
    """X1: completeness decides, and what it lacks is told file by file."""
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=rf"it lacks .*{name}") as caught:
        MnnFolder.open(folder)
    assert len(caught.value.details["missing"]) == 1


def test_all_missing_files_are_named_at_once(folder: Path) -> None:
    """X1: whoever copies a folder copies the rest of it in one go."""
    for name in FILES[1:]:
        (folder / name).unlink()
    with pytest.raises(ModelFileError) as caught:
        MnnFolder.open(folder)
    assert all(name in caught.value.message for name in FILES[1:])


def test_a_vocabulary_of_either_form_will_do(folder: Path) -> None:
    """X1: newer exports write tokenizer.mtok, of which the head is the same."""
    head = (folder / "tokenizer.txt").read_bytes().splitlines(keepends=True)[:3]
    head[0] = b"430 4\n"
    (folder / "tokenizer.mtok").write_bytes(b"".join(head) + b"\0binary\n")
    (folder / "tokenizer.txt").unlink()
    found = MnnFolder.open(folder)
    assert found.tokenizer.name == "tokenizer.mtok"
    assert (found.head.form, found.head.n_vocab, found.head.keeps_bytes) == (TokenizerForm.PIPELINE, 0, True)
    assert found.n_vocab == N_VOCAB


def cut(name: str) -> Callable[[Path], None]:
    """Leave the first half of a file."""

    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2 - 1])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut("config.json"), "no JSON"),
        (cut("llm_config.json"), "no JSON"),
        (cut("embeddings_bf16.bin"), "cut short"),
        (cut("llm.mnn"), "no graph of MNN's, or cut short"),
        (lambda folder: (folder / "llm.mnn.weight").write_bytes(b""), "it is empty"),
        (lambda folder: (folder / "tokenizer.txt").write_text("431 1\n"), "no tokenizer of MNN's"),
        (lambda folder: (folder / "tokenizer.txt").write_text("430 1\n1 1 0\n5 x\n9\n"), "2 whole numbers"),
        (lambda folder: (folder / "tokenizer.txt").write_text("430 1\n1 0 0\n9\n9\n"), "names token 9"),
        (lambda folder: (folder / "llm.mnn.aria2").touch(), "download has not finished"),
        (lambda folder: changed(folder / "config.json", llm_weight="../w"), "llm_weight is '../w'"),
        (lambda folder: changed(folder / "config.json", tokenizer_file="/etc/passwd"), "tokenizer_file"),
        (lambda folder: changed(folder / "llm_config.json", hidden_size="64"), "hidden_size is 64"),
        (lambda folder: changed(folder / "llm_config.json", hidden_size=48), "cut short, or another"),
        (lambda folder: changed(folder / "llm_config.json", tie_embeddings=[8, 40, 99, 8, 0]), "end at 139"),
        (
            lambda folder: changed(folder / "llm_config.json", tie_embeddings=[8, -1, 0, 8, 0]),
            "whole numbers",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    """X1: truncated, corrupt and foreign files are refused before native code sees them."""
    spoil(folder)
    with pytest.raises(ModelFileError, match=said):
        MnnFolder.open(folder)


@pytest.mark.parametrize("setting", ["has_talker", "has_deepstack", "is_audio"])
def test_kinds_that_are_not_served_are_refused_by_name(folder: Path, setting: str) -> None:
    """X2: what the binding gives no way to use is no half-served model."""
    changed(folder / "llm_config.json", **{setting: True})
    with pytest.raises(UnsupportedError, match=setting):
        open_model(str(folder)).describe()


def test_a_model_that_sees_is_served_as_one_that_reads(folder: Path) -> None:
    """X2: its image part is left alone, and MNN is told so."""
    changed(folder / "llm_config.json", is_visual=True)
    found = MnnFolder.open(folder)
    assert found.has_vision
    assert found.native_settings()["is_visual"] is False
    described = open_model(str(folder)).describe()
    info = msgspec.structs.replace(
        model_info("m", str(folder)), pairing=described.pairing, pairing_reason=described.pairing_reason
    )
    with pytest.raises(UnsupportedError, match="takes text, no pictures: MNN's binding gives no way"):
        require_vision(info, "messages.0")


def test_mnn_is_told_nothing_that_opens_other_files(folder: Path) -> None:
    """X1: of the folder's settings only those pass that say how it is computed."""
    strange = {"base_dir": "/", "visual_model": "/etc/passwd", "tmp_path": "/elsewhere", "use_mmap": True}
    changed(folder / "config.json", **strange, precision="low", memory={"a": 1})
    told = MnnFolder.open(folder).native_settings()
    assert not set(strange) & set(told)
    assert told["precision"] == "low"
    assert "memory" not in told
    assert {name for name, link in told.items() if isinstance(link, str) and "/" in link} == set()


def test_weights_that_end_before_the_graph_says_are_cut_short(folder: Path) -> None:
    """X1: a graph names where its matrices lie in the file of weights."""
    (folder / "llm.mnn").write_bytes(graph_with_a_matrix(begin=100, sizes=(400, 20, 4)))
    assert read_graph(folder / "llm.mnn").end_of_weights == 524
    with pytest.raises(ModelFileError, match="end at 524 B: it is cut short"):
        MnnFolder.open(folder)
    (folder / "llm.mnn.weight").write_bytes(bytes(524))
    assert MnnFolder.open(folder).num_layers == 1


def graph_with_a_matrix(begin: int, sizes: tuple[int, ...]) -> bytes:
    """A graph of an attention and a convolution whose matrix lies outside, laid out by hand."""
    data = bytearray(4)

    def table(fields: dict[int, bytes]) -> int:
        """Fields of four bytes by number; its place."""
        count = max(fields, default=-1) + 1
        places = {number: 4 + 4 * at for at, number in enumerate(fields)}
        head = len(data)
        data.extend(struct.pack("<HH", 4 + 2 * count, 4 + 4 * len(fields)))
        data.extend(b"".join(struct.pack("<H", places.get(number, 0)) for number in range(count)))
        place = len(data)
        data.extend(struct.pack("<i", place - head) + b"".join(fields.values()))
        return place

    def link(place: int, target: int) -> None:
        struct.pack_into("<I", data, place, target - place)

    net = table({3: bytes(4)})
    struct.pack_into("<I", data, 0, net)
    ops = len(data)
    link(net + 4, ops)
    data.extend(struct.pack("<III", 2, 0, 0))
    attention = table({5: struct.pack("<i", 299)})
    link(ops + 4, attention)
    convolution = table({2: bytes(4), 5: struct.pack("<i", 12)})
    link(ops + 8, convolution)
    main = table({6: bytes(4)})
    link(convolution + 4, main)
    numbers = len(data)
    link(main + 4, numbers)
    data.extend(struct.pack(f"<I{len(sizes) + 1}q", len(sizes) + 1, begin, *sizes))
    return bytes(data)


def is_refused(folder: Path) -> bool:
    """Whether a folder is refused, with an error that names it; any other error comes out."""
    try:
        reader = open_model(str(folder))
        reader.estimator()(ModelSpec(id="m", path=str(folder)))
        reader.describe()
        assert reader.fingerprint
    except (ModelFileError, UnsupportedError) as error:
        return str(folder) in error.message
    return False


def test_no_mutation_is_more_than_a_typed_error(folder: Path, whole: Path) -> None:
    """X1: bytes that are changed, missing or too many in any file, without native code."""
    draw = random.Random(20)
    num_refused = 0
    for number in range(NUM_MUTATIONS):
        name = FILES[number % len(FILES)]
        data = bytearray((whole / name).read_bytes())
        match draw.randrange(4):
            case 0:
                del data[draw.randrange(len(data)) :]
            case 1:
                data[draw.randrange(len(data)) :] = draw.randbytes(draw.randrange(1, 64))
            case _:
                near = len(data) if draw.random() < 0.3 else min(len(data), 256)
                for _ in range(draw.randrange(1, 9)):
                    data[draw.randrange(near)] = draw.randrange(256)
        (folder / name).write_bytes(data)
        num_refused += is_refused(folder)
        (folder / name).write_bytes((whole / name).read_bytes())
    assert num_refused > NUM_MUTATIONS // 4


def test_another_file_is_another_fingerprint(folder: Path) -> None:
    """SPEC C1: the vocabulary is a part of the model as its weights are."""
    before = open_model(str(folder)).fingerprint
    (folder / "tokenizer.txt").write_text((folder / "tokenizer.txt").read_text() + "\n")
    assert open_model(str(folder)).fingerprint != before
    assert read_head(folder / "tokenizer.txt").n_vocab == N_VOCAB


@pytest.mark.parametrize(
    ("machine", "flags", "label"),
    [
        ("x86_64", "fpu sse4_1 avx avx2 avx512f", "AVX512"),
        ("x86_64", "fpu sse4_1 avx avx2", "AVX2"),
        ("x86_64", "fpu", "CPU"),
        ("arm64", "", "NEON"),
        ("aarch64", "fp asimd", "NEON"),
    ],
)
def test_the_label_names_the_widest_instructions(machine: str, flags: str, label: str) -> None:
    """X2: what computes, for people."""
    assert instructions(machine, flags) == label
