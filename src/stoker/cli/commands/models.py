"""`stoker models`: what is on this machine and can be asked for by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from stoker.cli.options import AsJson, Config, engine_settings
from stoker.cli.tables import new_console, print_table
from stoker.wording import size_text

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.models.store import ModelFile


def models(*, as_json: AsJson = False, config: Config = None) -> None:
    """List the models that are here, with class, size and context; broken files with the reason."""
    from stoker.models.store import ModelStore

    folder = engine_settings(config).models_dir
    found = ModelStore(folder).list()
    if as_json:
        typer.echo(json.dumps([_as_record(model) for model in found], indent=2))
        return
    if not found:
        typer.echo(f"no models here: put GGUF files into {folder} or run: stoker pull REPO")
        return
    _show(found, folder)


def _as_record(model: ModelFile) -> dict[str, object]:
    is_projector = _is_projector(model)
    return {
        "id": model.id,
        "class": "projector" if is_projector else model.model_class,
        "size_bytes": model.size_bytes,
        "n_ctx_train": model.n_ctx_train,
        "quantisation": model.quantisation,
        "path": model.path,
        "error": model.error.message if model.error and not is_projector else None,
    }


def _is_projector(model: ModelFile) -> bool:
    from stoker.models.projector import is_projector

    return model.error is not None and is_projector(model.path)


def _show(found: list[ModelFile], folder: Path) -> None:
    console = new_console()
    header = ("name", "class", "size", "context", "quantisation", "path")
    print_table(console, header, [_row(model) for model in found], [_style(model) for model in found])
    console.print(f"models folder: {folder}", style="dim")


def _row(model: ModelFile) -> tuple[str, ...]:
    size = size_text(model.size_bytes)
    if model.error is None:
        context = str(model.n_ctx_train or "")  # few folders of MNN say it
        return model.id, str(model.model_class), size, context, model.quantisation, model.path
    if _is_projector(model):
        return model.id, "projector", size, "", "", f"{model.path} (--mmproj)"
    return model.id, "broken", size, "", "", model.error.message


def _style(model: ModelFile) -> str:
    return "red" if model.error is not None and not _is_projector(model) else ""
