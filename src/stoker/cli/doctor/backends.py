"""The backends: which are installed, in which version, on which device, and whether they compute here.

What a backend examines of itself is in its module `self_test`, if it has one:
`self_test() -> Iterable[tuple[str, bool, str]]` gives a subject, whether it is fine, and what was found.
"""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from stoker.backends.registry import BACKENDS, entry_of, readers_of
from stoker.backends.trial.trial import TrialVerdict, library_versions, remembered, try_in_child
from stoker.cli.doctor.finding import Finding, Level
from stoker.errors import StokerError
from stoker.ipc.model import ModelSpec
from stoker.models.reader import LoadContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.backends.registry import BackendEntry
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings

SUBJECT = "backend"
_USE_ANOTHER = "its models are served by another backend, or by their declared fallback, where there is one"


def backends(usable: list[ModelFile], settings: EngineSettings) -> Iterator[Finding]:
    """Each backend in the order of the rule, with what its trial found on a model that is here."""
    entries = [entry for entry in BACKENDS if not entry.scheme]
    for entry in sorted(entries, key=lambda each: each.rank_here):
        if entry.missing:
            yield _not_installed(entry)
        elif not entry.needs:
            yield Finding(
                SUBJECT, Level.OK, f"{entry.name}: as its build and smoke decode say, above and below"
            )
        else:
            yield _tried(entry, _model_of(entry, usable), settings)


def self_test(name: str, usable: list[ModelFile], settings: EngineSettings) -> Iterator[Finding]:
    """All that can be found out of one backend here, for a report.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    entry = entry_of(name)
    system = (
        f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    )
    yield Finding("system", Level.OK, f"Stoker {version('stoker')}, {system}")
    if entry.missing:
        finding = _not_installed(entry)
        yield Finding(SUBJECT, Level.BROKEN, finding.text, finding.remedy)
        return
    own = list(_own(entry))
    yield from own
    model = _model_of(entry, usable)
    if model is not None:
        yield _verdict(entry, model, _now(entry, model, settings))
    elif not own:
        yield Finding(
            SUBJECT,
            Level.WARNING,
            f"{_title(entry)}: there is no model of it here",
            f"put one into {settings.models_dir}, or: stoker pull REPO",
        )


def _own(entry: BackendEntry) -> Iterator[Finding]:
    """What a backend finds of itself, if it has a test; a fault of that is a finding too."""
    module = f"{entry.module.rpartition('.')[0]}.self_test"
    try:
        test = import_module(module).self_test
    except ModuleNotFoundError:
        return
    try:
        for subject, is_fine, text in test():
            yield Finding("self-test", Level.OK if is_fine else Level.BROKEN, f"{subject}: {text}")
    except Exception as error:  # noqa: BLE001 - a library on a machine that we have not seen may raise anything
        yield Finding(SUBJECT, Level.BROKEN, f"{_title(entry)}: {type(error).__name__}: {error}")


def _not_installed(entry: BackendEntry) -> Finding:
    text = f"{entry.name}: not installed ({', '.join(entry.missing)})"
    return Finding(SUBJECT, Level.OK, text, f"to have it: pip install 'stoker[{entry.extra}]'")


def _model_of(entry: BackendEntry, usable: list[ModelFile]) -> ModelFile | None:
    """The smallest model that is this backend's before any other's."""
    mine = [model for model in usable if readers_of(model.path)[0] is entry]
    return min(mine, key=lambda model: model.size_bytes, default=None)


def _tried(entry: BackendEntry, model: ModelFile | None, settings: EngineSettings) -> Finding:
    if model is None or model.description is None:
        text = f"{_title(entry)}: no model of it is here, so nothing was computed"
        return Finding(SUBJECT, Level.OK, text, f"to have it examined: stoker doctor --backend {entry.name}")
    known = remembered(entry, model.description, settings.cache_dir)
    return _verdict(entry, model, known or _now(entry, model, settings))


def _now(entry: BackendEntry, model: ModelFile, settings: EngineSettings) -> TrialVerdict:
    spec = ModelSpec(id=model.id, path=model.path, backend=entry.name, num_threads=settings.threads)
    assert model.description is not None, f"{model!r} cannot be loaded"
    try:
        return try_in_child(entry, spec, model.description, LoadContext(lambda _: None, settings.cache_dir))
    except StokerError as error:
        return TrialVerdict(is_ok=False, detail=error.message)


def _verdict(entry: BackendEntry, model: ModelFile, found: TrialVerdict) -> Finding:
    if not found.is_ok:
        text = f"{_title(entry)}: {model.id} does not decode: {found.detail}"
        return Finding(SUBJECT, Level.WARNING, text, _USE_ANOTHER)
    times = f"{found.took_s:.1f} s with the start of its process, a token {found.token_s * 1000:.1f} ms"
    return Finding(SUBJECT, Level.OK, f"{_title(entry)}: {model.id} decodes with {found.label}: {times}")


def _title(entry: BackendEntry) -> str:
    versions = (f"{name} {found}" for name, found in library_versions(entry).items())
    return f"{entry.name} ({', '.join(versions)})" if entry.needs else entry.name
