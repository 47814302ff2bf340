"""The header of a projector, and whether it goes with a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hearing_kinds import write_listener
from stoker.client.models.specs import ModelSource, projector_by_model
from stoker.errors import InvalidRequestError, ModelFileError, UnsupportedError
from stoker.ipc.model import ModelSpec, Pairing
from stoker.ipc.request import Sound
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.models.projector import check_heard, pairing_of, read_projector
from stoker.models.store import ModelStore
from stoker.settings import EngineSettings
from tiny_models import write_bert, write_llama, write_mamba
from tiny_projector import ENCODER_FEED_FORWARD, ENCODER_WIDTH, IMAGE_SIZE, PATCH_SIZE, write_projector


def test_a_projector_says_what_it_is(tmp_path: Path) -> None:
    """SPEC V1: kind, sizes, and the width of its embeddings from its last matrix."""
    found = read_projector(write_projector(tmp_path / "mmproj.gguf", n_embd=48))
    assert (found.kind, found.has_vision, found.n_embd_out) == ("mlp", True, 48)
    assert (found.image_size, found.patch_size) == (IMAGE_SIZE, PATCH_SIZE)
    assert (found.width, found.feed_forward) == (ENCODER_WIDTH, ENCODER_FEED_FORWARD)
    assert 0 < found.size_bytes < found.path.stat().st_size


def test_a_model_and_its_own_projector_are_ready(tmp_path: Path) -> None:
    """SPEC V1: the widths agree."""
    model = read_header(write_llama(tmp_path / "m.gguf"))
    assert pairing_of(model, write_projector(tmp_path / "p.gguf")).pairing is Pairing.READY


def test_another_models_projector_is_broken_and_both_are_named(tmp_path: Path) -> None:
    """SPEC V1: the widths differ."""
    model = read_header(write_llama(tmp_path / "m.gguf"))
    verdict = pairing_of(model, write_projector(tmp_path / "p.gguf", n_embd=48))
    assert verdict.pairing is Pairing.BROKEN
    assert "p.gguf" in verdict.reason
    assert "48 numbers, those of m.gguf 32" in verdict.reason


def test_a_projector_that_neither_sees_nor_hears_is_broken(tmp_path: Path) -> None:
    """SPEC V1: verified to support vision or hearing."""
    model = read_header(write_llama(tmp_path / "m.gguf"))
    verdict = pairing_of(model, write_projector(tmp_path / "p.gguf", has_vision=False))
    assert verdict.pairing is Pairing.BROKEN
    assert "no encoder of images or of sound" in verdict.reason


@pytest.mark.parametrize("write", [write_bert, write_mamba])
def test_only_decoders_see(tmp_path: Path, write) -> None:
    """SPEC V1, K1: an encoder or a recurrent model with a projector is broken, and why is said."""
    verdict = pairing_of(read_header(write(tmp_path / "m.gguf")), write_projector(tmp_path / "p.gguf"))
    assert verdict.pairing is Pairing.BROKEN
    assert "only decoders" in verdict.reason


def test_a_language_model_without_a_projector_is_no_vision_model(tmp_path: Path) -> None:
    """SPEC V1: nothing in its header speaks of pictures."""
    assert pairing_of(read_header(write_llama(tmp_path / "m.gguf")), None).pairing is Pairing.NONE


@pytest.mark.parametrize("cut", [4, 40, 400, -64])
def test_a_projector_that_was_cut_off_is_a_broken_file(tmp_path: Path, cut: int) -> None:
    """SPEC V1, R1: read with bounds before anything native sees it."""
    path = write_projector(tmp_path / "p.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelFileError):
        read_projector(path)


def test_a_language_model_is_no_projector(tmp_path: Path) -> None:
    """SPEC V1: a model given as projector is refused by name."""
    with pytest.raises(ModelFileError, match="'llama', no projector"):
        read_projector(write_llama(tmp_path / "m.gguf"))


def test_the_projector_goes_to_the_first_model_that_it_fits(tmp_path: Path) -> None:
    """SPEC V1, I2: `--mmproj` beside several models."""
    store = ModelStore(tmp_path)
    models = [store.resolve(str(write(tmp_path / name))) for write, name in MODELS]
    found = projector_by_model(write_projector(tmp_path / "p.gguf"), models)
    assert list(found) == [models[1].id]
    assert projector_by_model(None, models) == {}


MODELS = [(write_bert, "b.gguf"), (write_llama, "l.gguf"), (write_llama, "m.gguf")]


def test_a_projector_that_fits_no_model_is_refused_at_the_start(tmp_path: Path) -> None:
    """SPEC V1: by what is wrong with the first model; without models, by that."""
    model = ModelStore(tmp_path).resolve(str(write_llama(tmp_path / "m.gguf")))
    with pytest.raises(ModelFileError, match="another model's"):
        projector_by_model(write_projector(tmp_path / "p.gguf", n_embd=48), [model])
    deaf = write_projector(tmp_path / "q.gguf", has_vision=False)
    with pytest.raises(UnsupportedError):
        projector_by_model(deaf, [model])
    with pytest.raises(InvalidRequestError):
        projector_by_model(deaf, [])


def test_a_projector_that_hears_goes_to_its_model_and_is_counted(tmp_path: Path) -> None:
    """SPEC V9, R1: its kind and rate are known before it is loaded; it sees nothing."""
    path = write_llama(tmp_path / "m.gguf")
    projector = write_listener(tmp_path / "p.gguf")
    hearing = read_projector(projector).hearing
    assert hearing is not None
    assert (hearing.kind, hearing.rate_hz, hearing.most_s) == ("ultravox", 16_000, 0)
    model = ModelStore(tmp_path).resolve(str(path))
    spec = projector_by_model(projector, [model])[model.id]
    assert (spec.has_vision, spec.hears_hz, spec.hearing) == (False, 16_000, "ultravox")
    asked = ModelSpec(id="m", path=str(path), n_ctx=512, projector=spec)
    assert estimator_of(path)(asked).lines["projector"] >= spec.size_bytes + spec.compute_bytes
    assert spec.compute_bytes > hearing.num_heads * 1500 * 1500 * 4
    (found,) = ModelSource.read(EngineSettings(models=(str(path),), mmproj=projector)).served
    assert (found.info.has_vision, found.info.hears_hz, found.info.pairing) == (False, 16_000, "ready")
    assert found.info.hearing == "ultravox"


@pytest.mark.parametrize(
    ("kind", "sound", "error", "match"),
    [
        ("lfm2a", Sound(16_000, bytes(2 * 16_000 * 31)), InvalidRequestError, r"has 31.0 s.*at most 30 s"),
        ("ultravox", Sound(8_000, bytes(16_000)), InvalidRequestError, "takes 16000 samples a second"),
        ("ultravox", Sound(16_000, bytes(2)), InvalidRequestError, "1 samples is too short: 1600"),
    ],
)
def test_recordings_that_a_projector_cannot_take_are_refused(
    tmp_path: Path, kind: str, sound: Sound, error: type[Exception], match: str
) -> None:
    """SPEC V9: by its header; one that takes a recording as a whole has a bound."""
    header = read_projector(write_listener(tmp_path / "p.gguf", kind))
    with pytest.raises(error, match=match):
        check_heard(header, sound, 16_000)


def test_a_projector_that_sees_hears_nothing_and_one_of_voices_is_not_served(tmp_path: Path) -> None:
    """SPEC V9: each is refused with what it is for."""
    seeing = read_projector(write_projector(tmp_path / "p.gguf"))
    with pytest.raises(UnsupportedError, match=r"p\.gguf sees, and takes no recordings"):
        check_heard(seeing, Sound(16_000, bytes(3200)), 0)
    model = ModelStore(tmp_path).resolve(str(write_llama(tmp_path / "m.gguf")))
    with pytest.raises(UnsupportedError, match="makes a voice of a recording"):
        projector_by_model(write_listener(tmp_path / "v.gguf", "qwen3tts_spkenc"), [model])


def test_the_estimate_counts_the_projector(tmp_path: Path) -> None:
    """SPEC R1: its weights and what encoding takes, in a line of their own."""
    path = write_llama(tmp_path / "m.gguf")
    model = ModelStore(tmp_path).resolve(str(path))
    projector = projector_by_model(write_projector(tmp_path / "p.gguf"), [model])[model.id]
    plain = ModelSpec(id="m", path=str(path), n_ctx=512)
    seeing = ModelSpec(id="m", path=str(path), n_ctx=512, projector=projector)
    estimate = estimator_of(path)
    more = estimate(seeing).total_bytes - estimate(plain).total_bytes
    assert more == estimate(seeing).lines["projector"]
    assert more >= projector.size_bytes + projector.compute_bytes > projector.size_bytes > 0


@pytest.mark.parametrize(
    "speaks",
    [{"tokenizer.chat_template": "{% if part.type == 'image' %}"}, {"general.architecture": "qwen2vl"}],
    ids=["its template", "its architecture"],
)
def test_a_vision_model_without_its_projector_needs_one(tmp_path: Path, speaks: dict[str, str]) -> None:
    """SPEC V1: told from its chat template, or from what it is."""
    header = read_header(write_llama(tmp_path / "m.gguf"))
    architecture = speaks.get("general.architecture", header.architecture)
    header = replace(header, architecture=architecture, metadata={**header.metadata, **speaks})
    assert pairing_of(header, None).pairing is Pairing.NEEDS_PROJECTOR
