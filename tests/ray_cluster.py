"""A cluster of Ray on this machine, and a site on it, in a program of its own; all of it ends with that.

python -m tests.ray_cluster '{"replicas": 2, "port": 8000, "engine": {}, "door": {}}'
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

STORE_BYTES = 80 * 2**20  # Ray takes no less
APP = "site"
REPLICA, DOOR = "StokerReplica", "Door"
ENDS_S = 20.0
STOP_S = 5.0  # of a door
NUM_STARTS = 2
"""Ray gives a start up by itself where a machine is so busy that its own limits pass."""


@dataclass(frozen=True)
class ClusterSite:
    """A site that serves.

    Attributes:
        url: of the door.
        program: that started the cluster.
    """

    url: str
    program: psutil.Process

    def replicas(self) -> list[psutil.Process]:
        """Processes of the replicas that compute."""
        title = f"ray::ServeReplica:{APP}:{REPLICA}"
        return [one for one in self.program.children(recursive=True) if title in " ".join(_line(one))]

    def engines(self) -> list[psutil.Process]:
        """Processes of their engines."""
        children = [child for one in self.replicas() for child in one.children()]
        return [child for child in children if "stoker.engine" in " ".join(_line(child))]


def _line(process: psutil.Process) -> list[str]:
    try:
        line: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return line


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def ray_site(
    folder: Path, num_replicas: int, engine: dict[str, Any], door: dict[str, Any] | None = None
) -> Iterator[ClusterSite]:
    """A site of so many replicas with one door before them.

    Args:
        folder: for what they store.
        num_replicas: how many.
        engine: settings of each replica.
        door: settings of the door's server; None: the defaults.
    """
    own = {"cache_dir": str(folder / "cache"), "run_dir": str(folder / "run")}
    given = {"replicas": num_replicas, "engine": {**own, **engine}, "door": door or {}, "gate": own}
    port = _free_port()
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "tests.ray_cluster", json.dumps({**given, "port": port})]
    log = folder / "cluster.log"
    for _ in range(NUM_STARTS):
        process = _started(command, environment, log)
        assert process.stdout is not None
        if process.stdout.readline():
            break
        _end(process)
    else:
        raise AssertionError(log.read_text()[-4000:])
    try:
        yield ClusterSite(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        _end(process)


def _started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    with log.open("w") as file:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, env=environment, text=True)


def _end(process: subprocess.Popen[str]) -> None:
    """End a cluster, with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        program = psutil.Process(process.pid)
        started = program.children(recursive=True)
        assert process.stdin is not None
        process.stdin.close()  # it ends the cluster
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
        for one in [*started, program]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait(ENDS_S)
    assert process.stdout is not None
    process.stdout.close()


def main() -> None:
    """Start it, say so, and end it when nothing more is to be read."""
    import ray  # noqa: PLC0415 - the tests do not load it
    from ray import serve  # noqa: PLC0415
    from ray.serve.config import RequestRouterConfig  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    from stoker.ray.deploy import ACTOR_ENVIRONMENT, CONTROLLER, ROUTER  # noqa: PLC0415
    from stoker.ray.door import Door  # noqa: PLC0415
    from stoker.ray.replica import StokerReplica  # noqa: PLC0415

    given = json.loads(sys.argv[1])
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    quiet = LoggingConfig(enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet, controller_options=CONTROLLER)
    few: dict[str, Any] = {
        "max_ongoing_requests": 10_000,
        "graceful_shutdown_wait_loop_s": 0.1,
        "ray_actor_options": {"num_cpus": 0.01, "runtime_env": {"env_vars": ACTOR_ENVIRONMENT}},
    }
    router = RequestRouterConfig(request_router_class=ROUTER)
    replicas = serve.deployment(StokerReplica).options(
        name=REPLICA, num_replicas=given["replicas"], request_router_config=router, **few
    )
    doors = serve.deployment(Door).options(name=DOOR, **few)
    server = given["door"] | {"port": given["port"]}
    app = doors.bind(replicas.bind(given["engine"]), given["gate"], server, STOP_S)
    serve.run(app, name=APP, route_prefix=None, logging_config=quiet)
    print("ready", flush=True)  # noqa: T201 - what the test waits for
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
