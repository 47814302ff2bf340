"""Folders that somebody damaged: whatever is in them, the caller's process gets a typed error or a model."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from model_folders import tiny_adapter, tiny_folder
from stoker.backends.mlx.reader import FolderReader, open_model
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import ModelFileError, StokerError
from stoker.ipc.model import ModelSpec
from stoker.models.folders.adapters import check_fits_folder, read_folder_adapter
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext
from stoker.models.store import ModelStore

NUM_MUTATIONS = 200
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "adapter_config.json",
)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 2**70, -0.5, 1e300, float("inf"), float("nan")),
    *("", "x", "\ud800", "../../etc/passwd", "a" * 5000, [], [[]], {}, {"x": 1}, [1, "2", None]),
)
_NEST = 50_000


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with a key or index of it."""
    if isinstance(document, dict):
        here = [(document, key) for key in document]
    elif isinstance(document, list):
        here = [(document, at) for at in range(min(len(document), 20))]
    else:
        return []
    return here + [place for holder, key in here for place in _places(holder[key])]


def _change_json(document: Any, rng: random.Random) -> Any:
    """A document with one value changed, gone or moved."""
    found = copy.deepcopy(document)
    holder, key = rng.choice(_places(found))
    match rng.randrange(4):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(rng.choice(ODD))] = holder.pop(key)
        case 2 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice((-1, 1, 1000, 2**33))
        case _:
            holder[key] = rng.choice(ODD)
    return found


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    at, end = rng.randrange(len(data)), rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
        case 2:
            return data[: min(at, end)] + data[max(at, end) :]
        case 3:
            return b"[" * _NEST
        case _:
            found = bytearray(data)
            for place in rng.sample(range(len(data)), min(len(data), 8)):
                found[place] ^= 1 << rng.randrange(8)
            return bytes(found)


def _change_header(data: bytes, rng: random.Random) -> bytes:
    """Safetensors with another header before the same numbers."""
    length = int.from_bytes(data[:8], "little")
    header = _change_json(json.loads(data[8 : 8 + length]), rng)
    text = json.dumps(header, ensure_ascii=True).encode()
    said = len(text) if rng.random() < 0.8 else rng.choice((0, 1, len(text) - 1, 2**62, 2**64 - 1))
    return said.to_bytes(8, "little") + text + data[8 + length :]


def _mutate(folder: Path, rng: random.Random) -> str:
    """Damage one file; says what was done."""
    documents = [name for name in JSON_FILES if (folder / name).exists()]
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    kind = rng.choice(("json", "json", "bytes", "header", "header", "lost"))
    if kind == "json":
        file = folder / rng.choice(documents)
        file.write_text(json.dumps(_change_json(json.loads(file.read_text()), rng)))
    elif kind == "bytes":
        file = folder / rng.choice((*documents, *shards))
        file.write_bytes(_change_bytes(file.read_bytes(), rng))
    elif kind == "header":
        file = folder / rng.choice(shards)
        file.write_bytes(_change_header(file.read_bytes(), rng))
    else:
        file = folder / rng.choice((*documents, *shards))
        file.unlink()
        if rng.random() < 0.5:
            file.mkdir()
    return f"{kind} of {file.name}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nothing is wrong with."""
    folder = tiny_folder(tmp_path_factory.mktemp("mutated") / "model", num_shards=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "top_k": 5}))
    return folder


def _look(folder: Path) -> str:
    """Read a folder as the caller's process does, and the engine's before a load; the code of a refusal."""
    try:
        model = ModelStore(folder.parent).resolve(folder)
        assert model.description is not None
        json.dumps([model.id, model.size_bytes, model.description.chat_template]).encode()
        reader = open_model(model.path)
        assert len(reader.fingerprint) == 64
        assert all(size >= 0 for size in reader.estimator()(_spec(folder)).lines.values())
        if find_spec("tokenizers"):
            _read_texts(reader)
    except StokerError as error:
        assert len(error.message) < 1000, error.message  # noqa: PT017 - of every refusal
        return error.code
    return ""


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec(id="m", path=str(folder), num_slots=1, n_ctx=256)


def _read_texts(reader: FolderReader) -> None:
    from stoker.backends.mlx.text.vocabulary import FolderVocabulary  # noqa: PLC0415 - optional

    vocabulary = FolderVocabulary(reader.folder)
    tokens = vocabulary.tokenize("hello the world", add_special=True, parse_special=True)
    assert all(0 <= token < vocabulary.n_vocab for token in tokens)
    b"".join(map(vocabulary.special_piece, [*tokens, *vocabulary.eog_tokens]))
    vocabulary.least_tokens("hello " * 100, 1000)


def _load(folder: Path) -> str:
    """Load a folder and compute a token with it; the code of a refusal."""
    try:
        backend = open_model(str(folder)).load(_spec(folder), LoadContext(lambda _: None))
        rows = backend.launch(BatchPlan((PlanItem(0, 0, [1, 5, 6], 1),))).rows()
        assert rows.shape == (1, backend.capabilities.n_vocab)
        backend.close()
    except StokerError as error:
        return error.code
    return ""


def main(sound: Path, seeds: list[int]) -> None:
    """In a process of its own: load each, and say after each that it is still there."""
    for seed in seeds:
        print(seed, _damaged(sound, sound.parent / "loaded", seed, _load) or "loaded", flush=True)  # noqa: T201


def agree(sound: Path, seeds: range) -> None:
    """In a process of its own: change the config by each seed, and say where reading and loading differ."""
    file = sound / "config.json"
    config = json.loads(file.read_text())
    for seed in seeds:
        changed = _change_json(config, random.Random(seed))
        file.write_text(json.dumps(changed))
        read, loaded = _look(sound), _load(sound)
        if bool(read) != bool(loaded):
            print(f"seed {seed}: read {read!r}, loaded {loaded!r}: {changed}"[:500])  # noqa: T201
    print("done", flush=True)  # noqa: T201


def _in_a_process(call: str) -> subprocess.CompletedProcess[str]:
    """A call of this module in a process of its own."""
    where = os.pathsep.join([*map(str, (Path(__file__).parent, Path(__file__).parents[1])), *sys.path])
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import {Path(__file__).stem} as here; from pathlib import Path; here.{call}",
        ],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | {"PYTHONPATH": where},
    )


def _damaged(sound: Path, folder: Path, seed: int, call: Callable[[Path], str]) -> str:
    shutil.copytree(sound, folder)
    done = _mutate(folder, random.Random(seed))
    try:
        return call(folder)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {done}: {error!r}") from error
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def found(sound: Path) -> dict[int, str]:
    """What reading gives, by seed."""
    folder = sound.parent / "read"
    return {seed: _damaged(sound, folder, seed, _look) for seed in range(NUM_MUTATIONS)}


def test_a_damaged_folder_is_a_typed_error_or_a_model(found: dict[int, str]) -> None:
    """F6: two hundred of them, drawn from a seed."""
    assert set(found.values()) == {"", "model_file_invalid"}
    assert NUM_MUTATIONS / 3 < sum(map(bool, found.values())) < NUM_MUTATIONS


@pytest.mark.long
@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="the extra mlx is not installed")
def test_what_can_be_read_of_damage_is_loaded_or_refused_without_a_crash(
    sound: Path, found: dict[int, str]
) -> None:
    """F6: in a process of its own, which outlives all of them."""
    seeds = [seed for seed, code in found.items() if not code]
    done = _in_a_process(f"main(Path({str(sound)!r}), {seeds})")
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (done.returncode, len(said)) == (0, len(seeds)), done.stderr[-2000:]
    assert set(said.values()) == {"loaded"}  # reading has refused what a load would refuse


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="the extra mlx is not installed")
@pytest.mark.slow
def test_what_a_load_would_refuse_of_a_config_its_plan_refuses(tmp_path: Path) -> None:
    """F6: a plan that says `fits` of a plain transformer is kept by the load."""
    sound = tiny_folder(tmp_path / "model")
    done = _in_a_process(f"agree(Path({str(sound)!r}), range(300))")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 3}, "q_proj.weight of layer 0 has 64 rows; by num_attention_heads"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads is 3, which does not divide 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, the tensors are of 3 layers"),
        ({"tie_word_embeddings": False}, "there is no lm_head.weight"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "its weights are not quantised"),
    ],
)
def test_a_config_that_its_tensors_contradict_is_refused_before_a_load(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """F6: with the name of the value, by the headers alone."""
    folder = tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelFileError, match=re.escape(said)):
        open_model(str(folder)).describe()


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="the extra mlx is not installed")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": "x"}, "rope_theta is 'x', a number is needed"),
        ({"rope_scaling": 5}, "rope_scaling is '5', an object is needed"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is '-1', a number above 0 is needed"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
)
def test_a_value_that_its_model_cannot_have_is_refused_before_a_load(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """F6: as the installed mlx-lm has it; None is one that is gone."""
    folder = tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ModelFileError, match=re.escape(said)):
        open_model(str(folder)).describe()


def test_damaged_adapters_are_typed_errors_or_adapters(sound: Path, tmp_path: Path) -> None:
    """F6, F7."""
    adapter, model = tiny_adapter(tmp_path / "sound"), ModelFolder.open(sound)

    def read(folder: Path) -> str:
        try:
            check_fits_folder(read_folder_adapter(folder), model)
        except StokerError as error:
            return error.code
        return ""

    seeds = range(NUM_MUTATIONS // 2)
    said = [_damaged(adapter, tmp_path / "damaged", seed, read) for seed in seeds]
    assert set(said) == {"", "model_file_invalid", "unsupported"}


def test_a_list_of_models_outlives_each_of_them(sound: Path) -> None:
    """F6: a damaged folder is listed with what is wrong with it."""
    for seed in range(0, NUM_MUTATIONS, 20):

        def listed(folder: Path) -> str:
            assert ModelStore(folder).list() is not None
            return ""

        _damaged(sound, sound.parent / "models" / "m", seed, listed)
