"""`stoker serve`: the OpenAI-compatible server. Its options are settings, see `stoker.settings`.

Apart because each command has its module.
"""

from __future__ import annotations

import inspect
import logging
from typing import Annotated, Any

import typer

from stoker.cli.options import Config, option_of
from stoker.settings import flag_of, load_settings

OFFERED = """
    models host port slots ctx_size threads kv_cells memory_limit memory_margin keep_alive speculation
    draft_model lora default_max_tokens suspend_grace_s restore follow_sleep heat_trace mmproj image_roots
    allow_http_images max_images max_image_bytes max_image_pixels image_edge run_dir cache_dir api_key_file
    admin_key_file allow_downloads isolation watchdog_s max_queue max_prepare_s policy target_step_ms
    background_patience_s park_bytes cache_mode cache_ram_bytes cache_disk_bytes allowed_hosts cors_origins
"""
"""The settings that have an option, in the order in which `--help` shows them; all others are set by file."""


def serve(*, config: Config = None, **flags: Any) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM; one JSON line on stdout says when it is ready."""
    engine, server = load_settings(flags, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from stoker.server.serve import run_server

    raise typer.Exit(run_server(engine, server))


def _signature() -> inspect.Signature:
    """What typer reads the options from."""
    offered: dict[str, Any] = {
        name: Annotated[flag_of(name).kind | None, option_of(name)] for name in OFFERED.split()
    }
    offered["config"] = Config
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in offered.items()
        ]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]  # functions may have one
