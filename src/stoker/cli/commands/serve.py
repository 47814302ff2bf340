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
SpeculationMode = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        help="What guesses tokens ahead where that is quicker. \\[auto]",
        metavar="off|lookup|draft|auto",
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="LoRA adapter that requests may name; repeat for more. \\[none]",
        metavar="NAME=FILE[@SCALE]",
    ),
]
DraftModelRef = Annotated[
    str | None,
    typer.Option("--draft-model", help="Smaller model of the same vocabulary that guesses. \\[none]"),
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
Mmproj = Annotated[
    Path | None,
    typer.Option("--mmproj", help="Projector with which the first model that it fits reads pictures."),
]
ImageRoots = Annotated[
    list[str] | None,
    typer.Option("--image-root", help="Folder that pictures may be read from by path; repeat for more."),
]
AllowHttpImages = Annotated[
    bool | None,
    typer.Option("--allow-http-images/--no-http-images", help="Fetch pictures from public addresses. \\[no]"),
]
MaxImages = Annotated[int | None, typer.Option("--max-images", help="Pictures of one request. \\[16]")]
MaxImageBytes = Annotated[
    str | None,
    typer.Option("--max-image-bytes", help="Bytes of one encoded picture. \\[20MiB]", metavar="SIZE"),
]
MaxImagePixels = Annotated[
    int | None, typer.Option("--max-image-pixels", help="Pixels of one picture. \\[40000000]")
]
ImageEdge = Annotated[
    int | None,
    typer.Option("--image-edge", help="Pixels that a longer edge is shrunk to. \\[by the machine's memory]"),
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
AdminKeyFile = Annotated[
    Path | None,
    typer.Option("--admin-key-file", help="File with one operator's key a line. \\[none]"),
]
AllowDownloads = Annotated[
    bool | None,
    typer.Option(
        "--allow-downloads/--no-downloads",
        help="Let `load` download without an operator's key. \\[no]",
    ),
]
Isolation = Annotated[
    str | None,
    typer.Option("--isolation", help="Where native code runs. \\[process]", metavar="process|thread"),
]
WatchdogS = Annotated[
    float | None,
    typer.Option("--watchdog-s", help="Seconds of silence that end an engine. \\[10]"),
]
MaxPrepareS = Annotated[
    float | None,
    typer.Option("--max-prepare-s", help="Seconds that tokenising a request may take. \\[30]"),
]
MaxQueue = Annotated[int | None, typer.Option("--max-queue", help="Requests that may wait. \\[512]")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Further name accepted in the Host header; repeat for more."),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="Origin whose pages may call the server; repeat for more, * for all. \\[none]",
        metavar="ORIGIN",
    ),
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
    speculation: SpeculationMode = None,
    draft_model: DraftModelRef = None,
    lora: Lora = None,
    default_max_tokens: DefaultMaxTokens = None,
    suspend_grace_s: SuspendGraceS = None,
    restore: Restore = None,
    follow_sleep: FollowSleep = None,
    heat_trace: HeatTrace = None,
    mmproj: Mmproj = None,
    image_root: ImageRoots = None,
    allow_http_images: AllowHttpImages = None,
    max_images: MaxImages = None,
    max_image_bytes: MaxImageBytes = None,
    max_image_pixels: MaxImagePixels = None,
    image_edge: ImageEdge = None,
    run_dir: RunDir = None,
    cache_dir: CacheDir = None,
    api_key_file: ApiKeyFile = None,
    admin_key_file: AdminKeyFile = None,
    allow_downloads: AllowDownloads = None,
    isolation: Isolation = None,
    watchdog_s: WatchdogS = None,
    max_queue: MaxQueue = None,
    max_prepare_s: MaxPrepareS = None,
    policy: StepPolicy = None,
    target_step_ms: TargetStepMs = None,
    background_patience_s: BackgroundPatienceS = None,
    park_bytes: ParkBytes = None,
    cache_mode: CacheMode = None,
    cache_ram_bytes: CacheRamBytes = None,
    cache_disk_bytes: CacheDiskBytes = None,
    allowed_host: AllowedHosts = None,
    cors_origin: CorsOrigins = None,
    config: Config = None,
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM; one JSON line on stdout says when it is ready."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    from stoker.settings import load_settings

    engine, server = load_settings(flags, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from stoker.server.serve import run_server

    raise typer.Exit(run_server(engine, server))
