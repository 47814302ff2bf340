"""`stoker serve`: the OpenAI-compatible server. Its options are settings, see `stoker.settings`.

Apart because each command has its module.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Annotated, Any

import typer

from stoker.cli import logs
from stoker.cli.options import Config, option_of
from stoker.errors import InvalidRequestError
from stoker.settings import flag_of, load_settings, strange_variables

log = logging.getLogger(__name__)

PANELS = {
    "Models": """models slots ctx_size kv_cells lora draft_model speculation keep_alive default_max_tokens
        chat_template thinking rerank_output restore models_dir allow_downloads""",
    "Computing": "threads n_batch calibrated repeatable isolation watchdog_s heat_trace",
    "Devices": """backend gpu_layers device split_mode tensor_split main_gpu cpu_moe kv_type kv_layout
        flash_attention mmap kv_offload expert_budget placement device_lease""",
    "Memory": "memory_limit memory_margin park_bytes",
    "Cache": """cache_mode cache_ram_bytes cache_disk_bytes prefix_store prefix_store_bytes
        prefix_store_ttl_s cache_dir states_dir""",
    "Images, sound, documents": """mmproj image_roots allow_http_images max_images max_image_bytes
        max_image_pixels image_edge max_audio_bytes max_audio_seconds max_document_bytes max_document_pages
        max_document_chars max_document_seconds""",
    "Network": """host port ollama_port ollama api_key_file admin_key_file insecure allowed_hosts cors_origins
        max_connections max_body_bytes max_receiving_bytes receive_timeout_s keepalive_s strict ui
        request_texts""",
    "Stored responses": "responses_dir max_responses responses_bytes responses_age_s",
    "Scheduling": "policy target_step_ms max_step_ms background_patience_s max_queue max_prepare_s",
    "Starting, stopping, sleep": "drain_s suspend_grace_s follow_sleep run_dir",
    "Logging": "log_level log_format log_file quiet otel_endpoint",
}
"""The options, which are the settings, as `--help` shows them."""


def serve(context: typer.Context, *, config: Config = None, **flags: Any) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM; one JSON line on stdout says when it is ready."""
    from stoker.machine import malloc

    malloc.share_arena()
    engine, server = load_settings(flags, config)
    if engine.peers:
        text = "peers: `stoker serve` computes by itself; `stoker gate` serves with other machines"
        raise InvalidRequestError(text, param="peers")
    console = logs.terminal()
    logs.set_up(server, console)
    if strange := strange_variables():
        log.warning("the environment has %s, which are no settings", ", ".join(strange))
    from stoker.client.process.transport import spawned_ahead

    with spawned_ahead(engine, context.obj) as ahead:  # its imports and a server's take half a second each
        from stoker.cli.serve_screen import ServeInLog, ServeInTerminal
        from stoker.server.serve import Screen, new_engine, run_server

        again = None if config is None else partial(load_settings, flags, config)
        is_shown = not server.quiet and server.log_format == "text"
        screen: Screen = ServeInLog(engine, server)
        if is_shown and console is not None and not console.is_dumb_terminal:
            screen = ServeInTerminal(engine, server, console)
        raise typer.Exit(run_server(engine, server, screen, partial(new_engine, ahead=ahead), again))


def _signature() -> inspect.Signature:
    """What typer reads the options from."""
    offered: dict[str, Any] = {
        name: Annotated[flag_of(name).kind | None, option_of(name, panel)]
        for panel, names in PANELS.items()
        for name in names.split()
    }
    offered["config"] = Config
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter("context", keyword, annotation=typer.Context),
            *(
                inspect.Parameter(name, keyword, default=None, annotation=kind)
                for name, kind in offered.items()
            ),
        ]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]  # functions may have one
