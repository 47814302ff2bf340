"""`stoker gate`: one server in front of several machines. Its options are settings, see `stoker.settings`."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Annotated, Any

import typer

from stoker.cli import logs
from stoker.cli.options import Config, option_of
from stoker.settings import flag_of, load_settings, strange_variables

log = logging.getLogger(__name__)

PANELS = {
    "Machines": "peers peer_key_file peer_grace_s peer_wait_s",
    "Requests": "max_queue default_max_tokens",
    "Images, sound, documents": """image_roots allow_http_images max_images max_image_bytes max_image_pixels
        image_edge max_audio_bytes max_audio_seconds max_document_bytes max_document_pages
        max_document_chars max_document_seconds""",
    "Network": """host port ollama_port ollama api_key_file admin_key_file insecure allowed_hosts cors_origins
        max_connections max_body_bytes max_receiving_bytes receive_timeout_s keepalive_s strict ui
        request_texts""",
    "Stored responses": "responses_dir max_responses responses_bytes responses_age_s",
    "Starting, stopping, sleep": "drain_s suspend_grace_s follow_sleep run_dir states_dir",
    "Logging": "log_level log_format log_file quiet otel_endpoint",
}
"""The options, which are settings, as `--help` shows them."""


def gate(*, config: Config = None, **flags: Any) -> None:
    """Serve the models of several machines at one address; a request outlives the machine that runs it."""
    engine, server = load_settings(flags, config)
    console = logs.terminal()
    logs.set_up(server, console)
    if strange := strange_variables():
        log.warning("the environment has %s, which are no settings", ", ".join(strange))
    from stoker.cli.serve_screen import ServeInLog, ServeInTerminal
    from stoker.gate.runtime import GateRuntime
    from stoker.server.serve import Screen, run_server

    again = None if config is None else partial(load_settings, flags, config)
    is_shown = not server.quiet and server.log_format == "text"
    machines = [("machines" if at == 0 else "", url) for at, url in enumerate(engine.peers)]
    screen: Screen = ServeInLog(engine, server, lambda _: machines)
    if is_shown and console is not None and not console.is_dumb_terminal:
        screen = ServeInTerminal(engine, server, console, lambda _: machines)
    raise typer.Exit(run_server(engine, server, screen, GateRuntime, again))


def _signature() -> inspect.Signature:
    """What typer reads the options from."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    offered: dict[str, Any] = {
        name: Annotated[flag_of(name).kind | None, option_of(name, panel)]
        for panel, names in PANELS.items()
        for name in names.split()
    }
    offered["config"] = Config
    return inspect.Signature(
        [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in offered.items()]
    )


gate.__signature__ = _signature()  # type: ignore[attr-defined]  # functions may have one
