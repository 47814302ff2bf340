"""Models by name into a running engine: found, downloaded, loaded; the engine is the real one with fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from gguf_files import write_tiny

from model_folders import tiny_folder
from stoker import Runtime
from stoker.client.models.specs import ModelSource
from stoker.errors import (
    DownloadError,
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    NotReadyError,
    StokerError,
)
from stoker.ipc.model import Reach
from stoker.models.hub import hub as hub_module
from stoker.models.hub.downloads import Downloads
from stoker.models.hub.hub import PullRequest
from stoker.settings import EngineSettings

FAKE = "fake:eog_period=0"
REF = "acme/tiny-GGUF"

Pull = Callable[[PullRequest, Callable[[int, int, str], None]], Path]


class Mending(threading.Event):
    """What a hub waits for: it puts the bytes of a file right and is never in the way."""

    def __init__(self, file: Path, data: bytes) -> None:
        super().__init__()
        self._mend = lambda: file.write_bytes(data)

    def wait(self, timeout: float | None = None) -> bool:
        """Mend it now."""
        self._mend()
        return True


class SlowHub:
    """Stands in for `pull`: goes on when it is told to, and counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_pulls = 0
        self.go_on = threading.Event()
        self.was_stopped = threading.Event()
        self.error: StokerError | None = None

    def pull(self, request: PullRequest, on_progress: Callable[[int, int, str], None]) -> Path:
        """As `stoker.models.hub.hub.pull`."""
        assert request.reference == REF
        self.num_pulls += 1
        on_progress(30, 100, "tiny.gguf")
        self.go_on.wait()
        if self.error:
            raise self.error
        try:
            on_progress(100, 100, "tiny.gguf")
        except BaseException:
            self.was_stopped.set()
            raise
        return self.path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowHub:
    """A hub that holds every download until `go_on`."""
    found = SlowHub(tmp_path / "tiny.gguf")
    monkeypatch.setattr(hub_module, "pull", found.pull)
    return found


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime with one fake model and an empty models folder."""
    async with Runtime(FAKE, isolation="thread", models_dir=tmp_path, drain_s=0.0) as started:
        yield started


def states(runtime: Runtime) -> dict[str, str]:
    """State of each model."""
    return {status.id: str(status.state) for status in runtime.model_states()}


async def turns_until(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    while not condition():  # noqa: ASYNC110 - threads announce it to the event loop in their own time
        await asyncio.sleep(0)


async def test_all_who_want_one_download_share_it(hub: SlowHub, tmp_path: Path) -> None:
    """SPEC R4, L7: with its progress; the first to leave does not stop it."""
    moved: list[tuple[str, str, float, int]] = []
    found = Downloads(tmp_path, lambda *step: moved.append(step))
    wanting = [asyncio.create_task(found.get(REF)) for _ in range(3)]
    await turns_until(lambda: bool(moved))
    wanting[0].cancel()
    hub.go_on.set()
    assert await wanting[1] == await wanting[2] == hub.path
    assert (hub.num_pulls, REF in found) == (1, False)
    assert moved == [(REF, "tiny.gguf", 0.3, 100), (REF, "tiny.gguf", 1.0, 100)]


@pytest.mark.parametrize("how", ["all leave", "stop", "close"])
async def test_a_download_that_nobody_wants_ends_at_its_next_piece(
    hub: SlowHub, tmp_path: Path, how: str
) -> None:
    """SPEC R4: whoever waits is told at once."""
    moved: list[float] = []
    found = Downloads(tmp_path, lambda _ref, _name, fraction, _bytes: moved.append(fraction))
    wanting = asyncio.create_task(found.get(REF))
    await turns_until(lambda: bool(moved))
    match how:
        case "all leave":
            wanting.cancel()
        case "stop":
            found.stop(REF)
        case _:
            found.close()
    with pytest.raises(asyncio.CancelledError if how == "all leave" else NotReadyError):
        await wanting
    hub.go_on.set()
    assert await asyncio.to_thread(hub.was_stopped.wait, 20)
    assert moved == [0.3]


async def test_a_failed_download_raises_its_own_error(hub: SlowHub, tmp_path: Path) -> None:
    """SPEC L7: and the next one tries anew."""
    hub.error = DownloadError("offline")
    hub.go_on.set()
    found = Downloads(tmp_path, lambda *_: None)
    for _ in range(2):
        with pytest.raises(DownloadError, match="offline"):
            await found.get(REF)
    assert hub.num_pulls == 2


async def test_a_download_shows_among_the_models_and_is_stopped_like_one(
    hub: SlowHub, runtime: Runtime
) -> None:
    """SPEC L1: downloading with a fraction while it runs, gone afterwards."""
    loading = asyncio.create_task(runtime.load_model(REF))
    await turns_until(lambda: any(status.fraction == 0.3 for status in runtime.model_states()))
    assert states(runtime) == {"fake": "ready", REF: "downloading"}
    await runtime.unload_model(REF)
    with pytest.raises(NotReadyError, match="stopped"):
        await loading
    assert states(runtime) == {"fake": "ready"}
    hub.go_on.set()


async def test_only_what_lies_in_the_models_folder_is_loaded_by_name(
    runtime: Runtime, tmp_path: Path
) -> None:
    """SPEC S4, R7: a caller over HTTP may not have any file of this machine opened."""
    outside = write_tiny(tmp_path.parent / f"{tmp_path.name}-outside" / "tiny.gguf")
    for ref in (str(outside), f"../{outside.parent.name}/tiny.gguf", "no-such-model", "/etc/passwd"):
        with pytest.raises(ModelNotFoundError):
            await runtime.load_model(ref)
    assert states(runtime) == {"fake": "ready"}


async def test_a_served_model_is_unloaded_loaded_and_loaded_otherwise(runtime: Runtime) -> None:
    """SPEC R3, R5, L5: what is asked for differently is what it is then; a pin shows."""
    await runtime.unload_model("fake")
    assert states(runtime) == {"fake": "absent"}
    assert (await runtime.load_model("fake")).num_slots == 8
    info = await runtime.load_model("fake", slots=2, ctx_size=1024, keep_alive=-1.0)
    assert (info.num_slots, info.n_ctx) == (2, 1024)
    await runtime.pin_model("fake")
    (status,) = runtime.model_states()
    assert (status.is_pinned, status.keep_alive_s) == (True, -1.0)
    assert runtime.resolve("fake").num_slots == 2


async def test_a_model_whose_only_load_failed_is_none_of_the_models(runtime: Runtime) -> None:
    """No row of it, no model of that name; it is loaded as soon as its file is good (D25)."""
    bad = "fake:id=other,load_fails=1"
    with pytest.raises(ModelLoadError):
        await runtime.load_model(bad, reach=Reach.ANY)
    status = await runtime.status()
    assert states(runtime) == {"fake": "ready"}
    assert [model.id for model in status.models] == ["fake"]
    assert [info.id for info in runtime.models] == ["fake"]
    with pytest.raises(ModelNotFoundError, match=r"served: fake$"):
        runtime.resolve("other")
    with pytest.raises(ModelNotFoundError):
        await runtime.unload_model("other")
    info = await runtime.load_model("fake:id=other", reach=Reach.ANY)
    assert (info.id, runtime.resolve("other").path) == ("other", "fake:id=other")
    with pytest.raises(ModelLoadError):  # one that was served stays, and says why it is not in memory
        await runtime.load_model(bad, reach=Reach.ANY)
    assert set(states(runtime)) == {"fake", "other"}


async def test_nothing_is_loaded_before_the_start() -> None:
    """SPEC S3: not ready, not a crash."""
    runtime = Runtime(FAKE)
    assert runtime.model_states() == []
    with pytest.raises(NotReadyError):
        await runtime.load_model("fake")


def test_how_long_an_answer_may_be_follows_setting_then_tier() -> None:
    """SPEC M2: 0 is until the context is full."""
    small = EngineSettings(memory_limit=2**31)
    assert ModelSource(small).max_tokens == 300
    assert ModelSource(small.replace(default_max_tokens=7)).max_tokens == 7
    assert ModelSource(small.replace(default_max_tokens=0)).max_tokens is None


async def test_a_request_that_names_no_length_gets_the_default() -> None:
    """SPEC M2: one that does keeps its own."""
    async with Runtime(FAKE, isolation="thread", default_max_tokens=3, drain_s=0.0) as runtime:
        for asked, expected in ((None, 3), (5, 5), (0, 0)):
            deltas = [delta async for delta in runtime.generate("hello", max_tokens=asked)]
            assert sum(len(delta.token_ids) for delta in deltas) == expected


async def test_two_files_of_one_name_are_refused_at_the_start() -> None:
    """SPEC R4: before anything runs."""
    with pytest.raises(InvalidRequestError, match="two models"):
        await Runtime(FAKE, models=["fake:"], isolation="thread").start()


async def test_what_is_damaged_of_a_download_is_fetched_again_once(
    hub: SlowHub, runtime: Runtime, tmp_path: Path
) -> None:
    """F5: only where downloads are allowed; damage that stays is told."""
    folder = tmp_path / REF
    tiny_folder(folder)
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    hub.path, hub.go_on = folder, Mending(weights, sound)
    weights.write_bytes(sound[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        await runtime.serve_model(REF, Reach.LOCAL)
    assert hub.num_pulls == 0
    assert (await runtime.serve_model(REF, Reach.HUB)).path == str(folder)
    assert hub.num_pulls == 1


async def test_damage_that_stays_is_told_after_one_more_download(
    hub: SlowHub, runtime: Runtime, tmp_path: Path
) -> None:
    """F5."""
    folder = tiny_folder(tmp_path / REF)
    (folder / "config.json").write_text("{")
    hub.path = folder
    hub.go_on.set()
    with pytest.raises(ModelFileError, match="no JSON"):
        await runtime.serve_model(REF, Reach.HUB)
    assert hub.num_pulls == 1


async def test_a_runtime_of_a_hub_reference_downloads_it_only_where_it_may(
    hub: SlowHub, tmp_path: Path
) -> None:
    """FOUND library: `Runtime("OWNER/REPO", allow_downloads=True)`; `on_load` is told how far it is."""
    hub.path = Path("fake:eog_period=0")
    hub.go_on.set()
    where = {"isolation": "thread", "models_dir": tmp_path, "run_dir": tmp_path}
    with pytest.raises(ModelNotFoundError):
        await Runtime(REF, **where).start()
    assert hub.num_pulls == 0
    states = []
    runtime = Runtime(REF, models=["fake:id=other"], allow_downloads=True, **where)
    runtime.on_load = states.append
    async with runtime:
        assert [info.id for info in runtime.models] == ["fake", "other"]
        assert (await runtime.ask("x", max_tokens=2)).usage.completion_tokens == 2
    assert hub.num_pulls == 1
    told = [(state.model, state.stage, state.fraction) for state in states if state.state == "downloading"]
    assert told == [(REF, "tiny.gguf", 0.3), (REF, "tiny.gguf", 1.0)]
    with pytest.raises(ModelNotFoundError):
        await Runtime("no-such-model", allow_downloads=True, **where).start()
