"""Three replicas of Ray Serve, computed by llama.cpp: one is killed under 50 mixed streams, or its engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.chaos.test_gate_machines import Crowd
from tests.ray_cluster import ClusterSite, ray_site
from tests.tiny_models import write_llama

ENGINE = {
    "threads": 1,
    "slots": 24,
    "ctx_size": 8192,
    "repeatable": "on",
    "speculation": "off",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSite]:
    """Three replicas of one thread each."""
    folder = tmp_path_factory.mktemp("ray")
    model = write_llama(folder / "tiny.gguf", context=1024)
    template = folder / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }} {% endfor %}")
    with ray_site(folder, 3, {**ENGINE, "models": [str(model)], "chat_template": str(template)}) as started:
        yield started


def kill_engine(site: ClusterSite) -> None:
    """The replica starts another."""
    site.engines()[0].kill()


def kill_replica(site: ClusterSite) -> None:
    """Ray starts another."""
    site.replicas()[0].kill()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_engine, kill_replica])
async def test_fifty_streams_outlive_a_replica(site: ClusterSite, kill: object) -> None:
    """P40: all end once, with the text and the number of tokens of an undisturbed run."""
    assert callable(kill)
    calm = await Crowd(site.url, 50, 400).run()
    told = await Crowd(site.url, 50, 400).run(lambda: kill(site))
    for before, after in zip(calm, told, strict=True):
        assert after.texts == before.texts
        assert sorted(after.ends) == sorted(before.ends)
        assert after.num_tokens == before.num_tokens
        assert after.num_done == 1
