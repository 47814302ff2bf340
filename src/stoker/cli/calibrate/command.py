"""`stoker calibrate`: find the settings with which a model is quickest here, and use them (SPEC R16).

Owns what is shown, and when something is kept: at the end alone. What is tried is `measure`'s, what is
chosen `search`'s, where it is kept `stoker.models.calibration`'s.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import AsJson, Config, engine_settings, models_that_begin
from stoker.cli.session import tell

if TYPE_CHECKING:
    from stoker.cli.calibrate.search import Quickest, ToldTrial, TriedSetting
    from stoker.models.calibration import Calibration
    from stoker.settings import EngineSettings


def calibrate(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name or path. [embedded default]", metavar="MODEL", autocompletion=models_that_begin
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Setting to try; repeat for more. [all]", metavar="SETTING"),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Trials of each value.", min=1, metavar="N")] = 3,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was found.")] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Try threads, batch, cells, layers and guesses in short trials, and keep what is quickest."""
    from stoker.backends.registry import open_model
    from stoker.models.calibration import Calibrations
    from stoker.models.store import ModelStore

    settings = engine_settings(config)
    file = ModelStore(settings.models_dir).resolve(model)
    kept = Calibrations(settings.cache_dir)
    if forget:
        was_known = kept.forget(file.path)
        _say(as_json, {"model": file.id, "forgotten": was_known}, f"{file.id}: {_forgotten(was_known)}")
        return
    settings = settings.replace(models=(file.path,), model_tables={})
    given = settings.model_fields_set
    try:
        tried, found = asyncio.run(_search(settings, only or (), rounds))
    except KeyboardInterrupt:
        tell(f"{file.id}: stopped; what was known before holds")
        raise
    record = _record(file.path, tried, found)
    kept.keep(record, open_model(file.path).fingerprint)
    document = {"model": file.id, **_as_document(record, found), "not_tried": sorted(_left_out(given))}
    _say(as_json, document, _text(file.id, record, found, given))


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:  # noqa: FBT001 - the option's
    typer.echo(json.dumps(document, indent=2) if as_json else text)


def _forgotten(was_known: bool) -> str:  # noqa: FBT001 - a phrase for it
    return "forgotten, the defaults hold" if was_known else "nothing was found for it before"


async def _search(
    settings: EngineSettings, only: list[str] | tuple[str, ...], rounds: int
) -> tuple[list[TriedSetting], Quickest]:
    from stoker.cli.calibrate.measure import ModelTrials, dimensions
    from stoker.cli.calibrate.search import SettingsSearch
    from stoker.errors import InvalidRequestError
    from stoker.models.calibration import SETTINGS

    if strange := set(only) - set(SETTINGS):
        text = f"--only: {min(strange)!r} is not calibrated; {', '.join(SETTINGS)} are"
        raise InvalidRequestError(text, param="only")
    with tempfile.TemporaryDirectory(prefix="stoker-calibrate-") as folder:
        trials = ModelTrials(settings, Path(folder))
        tell("loading it with the defaults")
        is_exact = settings.repeatable == "on"  # then another type of cells is another text
        given = settings.model_fields_set | ({"kv_type"} if is_exact else set())
        asked = dimensions(await trials.look(), given)
        tried = [each for each in asked if not only or each.name in only]
        return tried, await SettingsSearch(tried, trials.measure, _tell_trial, rounds).run()


def _tell_trial(trial: ToldTrial) -> None:
    what = f"{trial.name} {trial.value or 'default'}" if trial.name else "all that was chosen"
    if not trial.name and trial.value is None:
        what = "the defaults"
    found = trial.found
    shown = f"{found.seconds:.2f} s, {found.tokens_per_s:.3g} tokens/s" if found else trial.error
    tell(f"{trial.number:>3} of {trial.most} at most  {what}: {shown}")


def _record(path: str, tried: list[TriedSetting], found: Quickest) -> Calibration:
    from stoker.models.calibration import Calibration

    return Calibration(
        path=path,
        settings=found.settings,
        default_s=found.default.seconds,
        best_s=found.best.seconds,
        default_tokens_per_s=found.default.tokens_per_s,
        best_tokens_per_s=found.best.tokens_per_s,
        tried=[each.name for each in tried],
        at=time.time(),
    )


def _as_document(record: Calibration, found: Quickest) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(record), "gain": round(record.gain, 4), "refused": found.refused}


def _left_out(given: set[str]) -> set[str]:
    from stoker.models.calibration import SETTINGS

    return given & set(SETTINGS)


def _text(model: str, record: Calibration, found: Quickest, given: set[str]) -> str:
    from stoker.models.calibration import settings_text

    times = f"{record.best_s:.2f} s instead of {record.default_s:.2f} ({record.gain:.0%} less)"
    rates = f"{record.best_tokens_per_s:.3g} tokens/s instead of {record.default_tokens_per_s:.3g}"
    text = f"{settings_text(record.settings)}: {times}, {rates}; used from now on where nothing else is set"
    if not record.settings:
        text = f"nothing is quicker than the defaults ({record.default_s:.2f} s) by more than the noise"
    lines = [f"{model}: {text}"]
    lines += [f"  {name} is set, and was not tried" for name in sorted(_left_out(given))]
    lines += [f"  {what} cannot be used: {why}" for what, why in found.refused.items()]
    return "\n".join(lines)
