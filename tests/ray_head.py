"""A cluster of Ray on this machine without a site, in a program of its own; all of it ends with that.

python -m tests.ray_head
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

STORE_BYTES = 80 * 2**20  # Ray takes no less
NUM_CPUS = 8
ENDS_S = 20.0
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""Of whatever speaks to it."""


@contextlib.contextmanager
def ray_head(folder: Path) -> Iterator[str]:
    """The address of a cluster.

    Args:
        folder: for its log.
    """
    with (
        (folder / "head.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.ray_head"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | ENVIRONMENT,
            text=True,
        ) as process,
    ):
        program = psutil.Process(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, (folder / "head.log").read_text()[-4000:]
            yield address
        finally:
            started = program.children(recursive=True)
            process.stdin.close()  # it ends the cluster
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_S)
            for one in [*started, program]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def main() -> None:
    """Start it, say where it is, and end it when nothing more is to be read."""
    import ray  # noqa: PLC0415 - the tests do not load it
    from ray import serve  # noqa: PLC0415

    context = ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    sys.stdout.write(context.address_info["gcs_address"] + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
