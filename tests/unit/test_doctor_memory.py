"""What `stoker doctor` says of memory limits, pressure and heat."""

import os
from dataclasses import replace

import pytest

from stoker.backends.device import Device, DeviceMemory
from stoker.cli.commands import doctor
from stoker.machine.device_lease import DeviceLease, lease_folder
from stoker.machine.limits import MemoryLimits
from stoker.machine.monitor import DeviceSample, Sample
from stoker.machine.nvml import CardProcess
from stoker.machine.thermal import Heat, HeatReading
from stoker.settings import EngineSettings

GIB = 1024**3


def sample(**fields):
    """A machine of a thousand bytes, nearly empty, with some fields changed."""
    rest = {
        "at_s": 0.0,
        "footprint_bytes": 0,
        "limit_bytes": 1000,
        "available_bytes": 900,
        "total_bytes": 1000,
        "system_available_bytes": 900,
    }
    return Sample(**{**rest, **fields})


def test_doctor_names_the_tier_and_its_limit():
    """SPEC M2: a machine of 4 GiB may use 2.3 GiB."""
    finding = doctor._limits(EngineSettings(), MemoryLimits(physical_bytes=4 * GIB, available_bytes=3 * GIB))
    assert finding.level == "ok"
    assert "limit 2.3 GiB (physical 4 GiB, tier 2.3 GiB), tier standard" in finding.text
    assert "answers of 800 tokens, idle models kept 600 s" in finding.text


def test_doctor_shows_what_settings_put_in_the_place_of_the_tiers_defaults():
    """SPEC M2: all overridable."""
    settings = EngineSettings(keep_alive=-1, default_max_tokens=0)
    profile = MemoryLimits(physical_bytes=4 * GIB, available_bytes=GIB // 2, user_bytes=3 * GIB)
    finding = doctor._limits(settings, profile)
    assert finding.level == "warning"
    assert "limit 3 GiB (physical 4 GiB, --memory-limit 3 GiB)" in finding.text
    assert "answers of any number of tokens, idle models kept for good" in finding.text


def test_doctor_says_how_short_memory_is_and_who_says_so():
    """SPEC M3: level, source and fraction."""
    calm = doctor._pressure(sample(psi_some_avg10=1.25))
    assert (calm.level, calm.remedy) == ("ok", "")
    assert calm.text.startswith("normal: system at 10%; programs waited for memory for 1.2%")
    short = doctor._pressure(sample(footprint_bytes=900))
    assert short.level == "warning"
    assert short.text == "critical: footprint at 90%; stalls (PSI) cannot be seen here"
    assert "background" in short.remedy


@pytest.mark.parametrize(
    ("trace", "level", "text"),
    [
        ("0,fair", "ok", "fair: trace"),
        ("0,98.5", "warning", "serious: trace at 98 °C"),
        ("0,critical", "warning", "critical: trace"),
        ("0,hot", "broken", "line 1"),
    ],
)
def test_doctor_says_how_hot_it_is(tmp_path, trace, level, text):
    """SPEC M6: from the recorded trace too; one that cannot be read is broken."""
    path = tmp_path / "heat.csv"
    path.write_text(trace, encoding="ascii")
    finding = doctor._heat(EngineSettings(heat_trace=path))
    assert finding.level == level
    assert text in finding.text
    assert bool(finding.remedy) is (level != "ok")


def test_doctor_takes_a_machine_without_sensors_for_nominal(monkeypatch):
    """SPEC M6: unknown sensors are nominal."""
    monkeypatch.setattr("stoker.machine.thermal.psutil.sensors_temperatures", dict, raising=False)
    finding = doctor._heat(EngineSettings())
    assert finding.level == "ok"
    assert finding.text.startswith("nominal: there are no sensors")


CARD = Device("NVIDIA H100", "CUDA", "CUDA0", lock="CUDA-0")


def test_doctor_shows_each_accelerator_with_who_has_its_memory():
    """SPEC M9: free and total, heat and power, other programs, and who holds the lease."""
    measured = DeviceSample(
        id="CUDA0",
        free_bytes=20 * GIB,
        total_bytes=80 * GIB,
        margin_bytes=GIB,
        heat=HeatReading(Heat.NOMINAL, "CUDA0", 55.0),
        power_w=120.4,
        processes=(CardProcess(7, "python", 40 * GIB), CardProcess(8, "", 0)),
    )
    finding = doctor._device(CARD, measured, "process 7 (model qwen)")
    assert finding.level == "ok"
    assert finding.text == (
        "CUDA0 NVIDIA H100: 20 GiB of 80 GiB free, 55 °C, 120 W, python (process 7) has 40 GiB;"
        " process 7 (model qwen) holds it"
    )
    full = doctor._device(CARD, replace(measured, free_bytes=GIB // 2), "")
    hot = doctor._device(CARD, replace(measured, heat=HeatReading(Heat.CRITICAL, "CUDA0", 95.0)), "")
    assert (hot.level, "; its heat is critical" in hot.text) == ("warning", True)
    assert hot.remedy.startswith("let it cool")
    assert (full.level, full.remedy) == (
        "warning",
        "no model fits beside what is on it; close other programs",
    )


def test_doctor_says_where_a_devices_memory_is_the_machines():
    """SPEC M9: an integrated device counts once; of one that says nothing nothing is known."""
    unified = replace(CARD, is_integrated=True)
    assert doctor._device(unified, None, "").text == "CUDA0 NVIDIA H100: uses the machine's memory"
    assert doctor._device(CARD, None, "").text.endswith("does not tell of its memory")


def test_doctor_looks_at_every_accelerator_of_the_build(tmp_path, monkeypatch):
    """SPEC M9: measured as the engine does; of a build without any nothing is said."""
    cards = (replace(CARD, read=lambda: DeviceMemory(3 * GIB, 4 * GIB)), replace(CARD, id="CUDA1"))
    monkeypatch.setattr("stoker.backends.llama.binding.accelerators", lambda: cards)
    settings = EngineSettings(cache_dir=tmp_path)
    with DeviceLease(["CUDA-0"], lease_folder()) as lease:
        lease.note("CUDA-0", "CUDA NVIDIA H100", ["qwen"])
        first, second = doctor._accelerators(settings)
    assert first.text.endswith(f"3 GiB of 4 GiB free; process {os.getpid()} (model qwen) holds it")
    assert second.text.startswith("CUDA1")
    monkeypatch.setattr("stoker.backends.llama.binding.accelerators", lambda: ())
    assert list(doctor._accelerators(settings)) == []
