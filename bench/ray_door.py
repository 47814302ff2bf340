"""What Ray costs: tokens a second of many streams, and the time to the first token, beside direct ones.

    python -m bench.ray_door --model smollm2-135m-instruct

Starts a cluster of one machine with a replica and a door, and a server of its own; one computes while the
other is asked nothing, in turns, so that what else the machine does weighs on both alike. Prints one line of
JSON. The bars: throughput at least 0.9, first token at most 12 ms later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator

from bench.gate import command, measured
from stoker.settings import EngineSettings, ServerSettings

STORE_BYTES = 80 * 2**20


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def door(model: str, slots: int, ingress: str) -> Iterator[str]:
    """A door with one replica behind it; gives its URL."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray  # noqa: PLC0415 - reads its environment then
    from ray import serve  # noqa: PLC0415

    from stoker.ray.deploy import deploy  # noqa: PLC0415
    from stoker.ray.site import Ingress, RaySettings, RaySite  # noqa: PLC0415

    engine, table = EngineSettings(models=(model,), slots=slots), RaySettings(cpus=0.1, door_cpus=0.1)
    site = RaySite(engine, ServerSettings(port=free_port()), table.replace(ingress=Ingress(ingress)))
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield deploy(site, lambda _line: None)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or file of the model")
    parser.add_argument("--streams", type=int, default=32, help="streams at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=4, help="crowds each way")
    parser.add_argument("--firsts", type=int, default=40, help="single requests each way")
    parser.add_argument("--slots", type=int, default=32, help="of the server and of the replica")
    parser.add_argument("--ingress", default="auto", help="how HTTP comes to the door: auto, door, proxy")
    given = parser.parse_args()
    with (
        command("serve", "--model", given.model, "--slots", str(given.slots)) as direct,
        door(given.model, given.slots, given.ingress) as site,
    ):
        found = asyncio.run(measured({"direct": direct, "ray": site}, given))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
