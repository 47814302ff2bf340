"""Adapters' files, the settings that name them, and the models they belong to; no native code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from stoker.client.models.beside import adapters_by_model, parse_adapter
from stoker.client.models.specs import ModelSource
from stoker.errors import InvalidRequestError, ModelFileError, UnsupportedError
from stoker.models.adapters import check_fits, read_adapter
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.estimate import estimator
from stoker.settings import EngineSettings, load_settings
from tiny_adapters import RANK, TARGETS, write_adapter
from tiny_models import HEAD_WIDTH, HEADS, WIDTH, write_bert, write_gemma3, write_llama, write_mamba

QUERIES = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain decoder."""
    return write_llama(tmp_path_factory.mktemp("base") / "base.gguf")


def write_odd(path: Path, change: Callable[[gguf.GGUFWriter], object], **keys: Any) -> Path:
    """A file that is nearly an adapter: other keys (None: left out), other tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    given = {"general.type": "adapter", "adapter.type": "lora", **keys}
    for key, value in given.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def factors(writer: gguf.GGUFWriter, *names: str) -> None:
    """Tensors of ones."""
    for name in names or (f"{QUERIES}.lora_a", f"{QUERIES}.lora_b"):
        shape = (RANK, WIDTH) if name.endswith("lora_a") else (HEADS * HEAD_WIDTH, RANK)
        writer.add_tensor(name, np.ones(shape, np.float32))


def test_a_header_tells_what_an_adapter_changes(tmp_path: Path, base: Path) -> None:
    """SPEC K6: the names of weights, and the bytes of its factors."""
    path = write_adapter(tmp_path / "a.gguf").path
    found = read_adapter(path)
    assert set(found.factors) == set(TARGETS)
    assert found.size_bytes == sum(4 * RANK * (rows + columns) for rows, columns in TARGETS.values())
    assert found.num_wide == max(rows for rows, _ in TARGETS.values())
    check_fits(found, read_header(base))


@pytest.mark.parametrize(
    ("change", "keys", "error", "text"),
    [
        (factors, {"general.type": "model"}, ModelFileError, "no adapter but 'model'"),
        (factors, {"adapter.type": "control_vector"}, UnsupportedError, "only lora is served"),
        (factors, {"adapter.alora.invocation_tokens": [1, 2]}, UnsupportedError, "aLoRA"),
        (lambda w: factors(w, f"{QUERIES}.lora_a"), {}, ModelFileError, "one factor, not two"),
        (lambda w: factors(w, QUERIES), {}, ModelFileError, "is no factor of a LoRA"),
        (lambda w: factors(w, "blk.0.attn_norm.weight"), {}, ModelFileError, "holds no factors"),
        (lambda w: (factors(w), w.add_float32("adapter.lora.alpha", np.nan)), {}, ModelFileError, "alpha"),
    ],
    ids=["a model", "another type", "alora", "half a pair", "a weight", "norms alone", "no number"],
)
def test_what_is_no_adapter_is_refused_by_its_header(
    tmp_path: Path, change: Any, keys: dict[str, Any], error: type[Exception], text: str
) -> None:
    """SPEC K6: before any native code sees it, with the reason."""
    with pytest.raises(error, match=text):
        read_adapter(write_odd(tmp_path / "odd.gguf", change, **keys))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    """SPEC K6: its tensors have to be there."""
    path = write_adapter(tmp_path / "a.gguf").path
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ModelFileError, match="truncated"):
        read_adapter(path)


@pytest.mark.parametrize(
    ("targets", "architecture", "text"),
    [
        ({QUERIES: (HEADS * HEAD_WIDTH, 2 * WIDTH)}, "llama", "its factors for 'blk.0.attn_q.weight' are"),
        ({"blk.7.attn_q.weight": (HEADS * HEAD_WIDTH, WIDTH)}, "llama", "has no tensor 'blk.7.attn_q"),
        (None, "qwen2", "made for qwen2, the model is llama"),
    ],
    ids=["a shape", "a layer", "an architecture"],
)
def test_an_adapter_of_another_base_is_refused_naming_both(
    tmp_path: Path, base: Path, targets: Any, architecture: str, text: str
) -> None:
    """SPEC K6: whatever tells them apart."""
    path = write_adapter(tmp_path / "a.gguf", architecture=architecture, targets=targets).path
    with pytest.raises(ModelFileError, match=rf"a\.gguf does not fit base\.gguf: .*{text}"):
        check_fits(read_adapter(path), read_header(base))


@pytest.mark.parametrize(
    ("write", "name", "shape", "text"),
    [
        (write_mamba, "blk.0.ssm_out.weight", (WIDTH, 2 * WIDTH), "class recurrent"),
        (write_bert, "blk.0.attn_q.weight", (WIDTH, WIDTH), "class encoder"),
        (write_gemma3, "blk.0.attn_q.weight", (HEADS * HEAD_WIDTH, WIDTH), "cannot go back"),
    ],
    ids=["recurrent", "encoder", "windowed"],
)
def test_models_that_cannot_be_adapted_say_why(
    tmp_path: Path, write: Any, name: str, shape: tuple[int, int], text: str
) -> None:
    """SPEC K6: by the class, or for what a failed step needs."""
    header = read_header(write(tmp_path / "m.gguf"))
    path = write_adapter(tmp_path / "a.gguf", architecture=header.architecture, targets={name: shape}).path
    with pytest.raises(UnsupportedError, match=text):
        check_fits(read_adapter(path), header)


def test_an_adapter_is_written_as_name_file_and_scale() -> None:
    """SPEC K6: the scale may be left out; an @ in a file's name is one."""
    found = parse_adapter("poet=/a/b.gguf@0.5")
    assert (found.name, found.path, found.scale) == ("poet", "/a/b.gguf", 0.5)
    assert parse_adapter("poet=/a/b.gguf").scale == 1.0
    assert parse_adapter("poet=/a@home/b@c.gguf").path == "/a@home/b@c.gguf"
    assert parse_adapter("poet=~/b.gguf").path == str(Path("~/b.gguf").expanduser())


@pytest.mark.parametrize("text", ["poet", "=b.gguf", "poet=", "po\net=b.gguf", "poet=b.gguf@1000"])
def test_other_ways_to_write_it_are_refused(text: str) -> None:
    """SPEC K6: by the setting's name."""
    with pytest.raises(InvalidRequestError, match="lora") as caught:
        parse_adapter(text)
    assert caught.value.param == "lora"


def test_an_adapter_belongs_to_the_first_model_that_it_fits(tmp_path: Path, base: Path) -> None:
    """SPEC K6: settings name models and adapters side by side; what an adapter takes is counted (R1)."""
    mamba, adapter = write_mamba(tmp_path / "mamba.gguf"), write_adapter(tmp_path / "a.gguf").path
    settings = EngineSettings(models=(str(mamba), str(base)), lora=(f"a={adapter}@0.5",))
    first, second = ModelSource.read(settings).served
    assert first.spec.adapters == first.info.adapters == ()
    (found,) = second.spec.adapters
    assert (found.name, found.scale, second.info.adapters) == ("a", 0.5, (found,))
    _, plain = ModelSource.read(settings.replace(lora=())).served
    estimate = estimator(read_header(base))
    assert found.size_bytes == read_adapter(adapter).size_bytes
    more = estimate(second.spec).total_bytes - estimate(plain.spec).total_bytes
    assert more >= found.size_bytes


def test_an_adapter_that_fits_no_model_fails_the_start(tmp_path: Path, base: Path) -> None:
    """SPEC K6: with what tells it from the first model."""
    adapter = write_adapter(tmp_path / "a.gguf", architecture="qwen2").path
    with pytest.raises(ModelFileError, match=r"a\.gguf does not fit base\.gguf"):
        ModelSource.read(EngineSettings(models=(str(base),), lora=(f"a={adapter}",)))
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        ModelSource.read(EngineSettings(models=(str(base),), lora=("a=nowhere.gguf",)))


@pytest.mark.parametrize("name", ["base", "default", "a"])
def test_names_of_models_and_adapters_are_all_different(tmp_path: Path, base: Path, name: str) -> None:
    """SPEC K6: a request names either."""
    path = write_adapter(tmp_path / "a.gguf").path
    settings = EngineSettings(models=(str(base),), lora=(f"a={path}", f"{name}={path}"))
    with pytest.raises(InvalidRequestError, match=f"'{name}' is the name of"):
        ModelSource.read(settings)


def test_without_a_model_to_adapt_there_is_no_adapter(tmp_path: Path) -> None:
    """SPEC K6: never silently left out."""
    path = write_adapter(tmp_path / "a.gguf").path
    with pytest.raises(InvalidRequestError, match=r"no model is served that a\.gguf could adapt"):
        adapters_by_model((f"a={path}",), ())


def test_settings_name_adapters_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: flag before environment before file."""
    config = tmp_path / "stoker.toml"
    config.write_text('lora = ["a=x.gguf", "b=y.gguf@0.5"]')
    assert load_settings({}, config)[0].lora == ("a=x.gguf", "b=y.gguf@0.5")
    monkeypatch.setenv("STOKER_LORA", "c=z.gguf, d=w.gguf@2")
    assert load_settings({}, config)[0].lora == ("c=z.gguf", "d=w.gguf@2")
    assert load_settings({"lora": ["e=v.gguf"]}, config)[0].lora == ("e=v.gguf",)
