"""A device that dies: the engine ends with it, another goes on with what is left, and nobody is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.backends.device import Device
from stoker.client.process.exit import (
    MAX_UNCHARGED,
    DeviceLosses,
    EngineExit,
    OomCounter,
    judge,
    lost_device,
)
from stoker.client.process.transport import ExitReport
from stoker.ipc.commands import LostDevices
from stoker.ipc.model import ModelSpec, PlacementSpec
from stoker.models.placement import with_device_ids
from stoker.runtime import Runtime

CUDA = "CUDA error: unspecified launch failure | current device: {}, in function sync at ggml-cuda.cu:99 | x"
CARDS = [Device("NVIDIA", "CUDA", id=f"CUDA{at}", index=at) for at in range(2)]


@pytest.mark.parametrize(
    ("said", "device"),
    [
        (CUDA.format(1), "CUDA1"),
        ("CUDA error: out of memory | current device: 0, in function alloc", ""),
        ("Fake error: the card is gone | current device: one, in function step", "one"),
        ("ggml.c:1: GGML_ASSERT(x) failed", ""),
        ("", ""),
    ],
)
def test_last_words_name_the_device(said: str, device: str) -> None:
    """SPEC R13: a device without memory is not lost."""
    assert lost_device(said) == device


def test_a_lost_device_is_not_charged_to_the_work_until_it_is_lost_too_often(tmp_path: Path) -> None:
    """SPEC R13, L3: else a card that dies at each load would be tried for ever."""
    oom = OomCounter(tmp_path, tmp_path)
    losses, sent = DeviceLosses(), []
    for number in range(1, MAX_UNCHARGED + 2):
        end = losses.note(judge(ExitReport(-6, CUDA.format(0)), None, oom))
        assert (end.lost_device, end.is_blamable) == ("CUDA0", number > MAX_UNCHARGED)
        assert end.reason.startswith("lost the device CUDA0")
    losses.tell(sent.append)
    losses.forgive()
    losses.tell(sent.append)
    assert sent == [LostDevices({"CUDA0": MAX_UNCHARGED + 1})]
    other = EngineExit("killed", is_blamable=True)
    assert losses.note(other) is other


def test_a_placement_goes_on_without_what_was_lost() -> None:
    """SPEC R13: also one that names the device; a mistake stays one."""
    spec = ModelSpec(
        id="m", path="m", placement=PlacementSpec(device=("CUDA0", "CUDA1"), tensor_split=(3, 1))
    )
    left = with_device_ids(spec, CARDS[1:], ["CUDA0"]).placement
    assert (left.device, left.tensor_split) == (("CUDA1",), ())
    alone = ModelSpec(id="m", path="m", placement=PlacementSpec(device=("CUDA0",)))
    assert with_device_ids(alone, CARDS[1:], ["CUDA0"]).placement.device == ("none",)


async def test_an_answer_goes_on_where_another_device_is_left(tmp_path: Path) -> None:
    """SPEC R13, L3: a real engine process; the same tokens, a label of what computes now, and why."""
    others = tmp_path / "others"
    others.write_text("0 0", "ascii")
    cards = f"weights_mib=10,device=one+two,device_mib=90+80,others={others}"
    models = [f"fake:id=cards,eog_period=0,step_delay_s=0.005,{cards}", "fake:id=alone,eog_period=0"]
    settings = {"cache_dir": tmp_path / "cache", "run_dir": tmp_path / "run", "memory_margin": 0}
    async with Runtime(models=models, device_lease=False, **settings) as runtime:
        assert runtime.models[0].label == "fake · one"
        texts = {}
        for model in ("alone", "cards"):
            pieces: list[str] = []
            async for piece in runtime.generate("on and on", model=model, max_tokens=120, temperature=0.0):
                pieces.append(piece.text)
                if model == "cards" and len(pieces) == 20:
                    news = tmp_path / "news"  # an engine reads it any time: all of it or what was before
                    news.write_text("gone 0", "ascii")
                    news.replace(others)
            texts[model] = "".join(pieces)
        status = await runtime.status()
        info = runtime.models[0]
    assert texts["cards"] == texts["alone"]
    assert info.label == "fake · two"
    assert info.degraded == ["without one, which was lost"]
    assert [exit_.num_failed for exit_ in status.exits] == [0]
    assert "lost the device one" in status.exits[-1].reason
