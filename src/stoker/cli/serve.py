"""`stoker serve`: the OpenAI-compatible server. Every option is a setting; see `stoker.settings`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import Config, CtxSize, Threads

StepPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="What a step favours while somebody waits for tokens. \\[latency]",
        metavar="latency|balanced|throughput",
    ),
]
TargetStepMs = Annotated[
    float | None,
    typer.Option(
        "--target-step-ms", help="Longest a step should take while interactive requests decode. \\[50]"
    ),
]
BackgroundPatienceS = Annotated[
    float | None,
    typer.Option(
        "--background-patience-s",
        help="Seconds background work goes without a step before it gets one in ten. \\[30]",
    ),
]
ParkBytes = Annotated[
    str | None,
    typer.Option(
        "--park-bytes", help="Host memory for states of parked requests, a model. \\[1GiB]", metavar="SIZE"
    ),
]
CacheMode = Annotated[
    str | None,
    typer.Option(
        "--cache-mode",
        help="What is kept of finished work. \\[live+snapshot]",
        metavar="off|live|snapshot|live+snapshot",
    ),
]
CacheRamBytes = Annotated[
    str | None,
    typer.Option("--cache-ram-bytes", help="Host memory for kept states; 0: none. \\[1GiB]", metavar="SIZE"),
]
CacheDiskBytes = Annotated[
    str | None,
    typer.Option(
        "--cache-disk-bytes",
        help="Disk for kept states, under --cache-dir; 0: none. \\[4GiB]",
        metavar="SIZE",
    ),
]
MemoryMargin = Annotated[
    str | None,
    typer.Option(
        "--memory-margin", help="Free memory that loading has to leave; 0: none. \\[512MiB]", metavar="SIZE"
    ),
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        "--keep-alive",
        help="How long a model stays after its last request: 30s, 10m, -1. \\[by the machine's memory]",
        metavar="TIME",
    ),
]
DefaultMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--default-max-tokens",
        help="Tokens of an answer that does not say; 0: until the context is full. "
        "\\[by the machine's memory]",
    ),
]
SuspendGraceS = Annotated[
    float | None,
    typer.Option("--suspend-grace-s", help="Seconds between a suspend and its begin. \\[0]"),
]
Restore = Annotated[
    bool | None,
    typer.Option("--restore/--no-restore", help="Without --model, serve what was loaded last. \\[no]"),
]
FollowSleep = Annotated[
    bool | None,
    typer.Option("--follow-sleep/--no-follow-sleep", help="Suspend and resume with the machine. \\[yes]"),
]
HeatTrace = Annotated[
    Path | None,
    typer.Option("--heat-trace", help="Recorded heat to follow instead of the machine's sensors."),
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Folder of what has to survive the program.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="Model to serve; repeat for more. \\[embedded default]"),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to bind. \\[127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", help="0 picks a free one. \\[8686]")]
Slots = Annotated[int | None, typer.Option("--slots", help="Requests that run at once. \\[8]")]
KvCells = Annotated[int | None, typer.Option("--kv-cells", help="KV cells to allocate. \\[as --ctx-size]")]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", help="Bytes, or such as 4GiB. \\[what the machine has]", metavar="SIZE"),
]
CacheDir = Annotated[Path | None, typer.Option("--cache-dir", help="Folder of the cache.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="File with one accepted key a line. \\[no key]")
]
Isolation = Annotated[
    str | None,
    typer.Option("--isolation", help="Where native code runs. \\[process]", metavar="process|thread"),
]
WatchdogS = Annotated[
    float | None,
    typer.Option("--watchdog-s", help="Seconds of silence that end an engine. \\[10]"),
]
MaxQueue = Annotated[int | None, typer.Option("--max-queue", help="Requests that may wait. \\[512]")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Further name accepted in the Host header; repeat for more."),
]


def serve(
    *,
    model: Models = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    kv_cells: KvCells = None,
    memory_limit: MemoryLimit = None,
    memory_margin: MemoryMargin = None,
    keep_alive: KeepAlive = None,
    default_max_tokens: DefaultMaxTokens = None,
    suspend_grace_s: SuspendGraceS = None,
    restore: Restore = None,
    follow_sleep: FollowSleep = None,
    heat_trace: HeatTrace = None,
    run_dir: RunDir = None,
    cache_dir: CacheDir = None,
    api_key_file: ApiKeyFile = None,
    isolation: Isolation = None,
    watchdog_s: WatchdogS = None,
    max_queue: MaxQueue = None,
    policy: StepPolicy = None,
    target_step_ms: TargetStepMs = None,
    background_patience_s: BackgroundPatienceS = None,
    park_bytes: ParkBytes = None,
    cache_mode: CacheMode = None,
    cache_ram_bytes: CacheRamBytes = None,
    cache_disk_bytes: CacheDiskBytes = None,
    allowed_host: AllowedHosts = None,
    config: Config = None,
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM; one JSON line on stdout says when it is ready."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    from stoker.settings import load_settings

    engine, server = load_settings(flags, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from stoker.server.serve import run_server

    raise typer.Exit(run_server(engine, server))
