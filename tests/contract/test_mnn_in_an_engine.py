"""A model of MNN's in an engine: its text is MNN's own, and requests share its one sequence in turns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import PIL.Image
import pytest

from mnn_folders import ATTENTION_MAIN, tiny_mnn_folder
from stoker.backends.mnn.backend import MnnBackend
from stoker.client.requests.stream import TextDelta
from stoker.errors import UnsupportedError
from stoker.ipc.events import Parked
from stoker.settings import EngineSettings
from stoker.sync import Runtime

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import BatchPlan, Computed

MNN_LLM = pytest.importorskip("MNN.llm", reason="MNN is not installed (the mnn extra)")

NUM_PROMPTS, NUM_TOKENS = 20, 24
STEP_S = 0.002


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return tiny_mnn_folder(tmp_path_factory.mktemp("mnn") / "tiny")


@pytest.fixture(scope="module")
def runtime(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """The library with the model loaded, for which more slots are asked than it has."""
    place = tmp_path_factory.mktemp("runtime")
    with Runtime(model=folder, isolation="thread", cache_dir=place, models_dir=place, slots=4) as opened:
        yield opened


def said(deltas: Iterable[TextDelta]) -> str:
    """The whole text."""
    return "".join(delta.text for delta in deltas)


@pytest.mark.long
def test_the_text_of_twenty_prompts_is_mnns_own(runtime: Runtime, folder: Path) -> None:
    """X2: another copy of the model, loaded by MNN with the folder's own settings, answers the same."""
    native = MNN_LLM.create(str(folder / "config.json"))
    own = {"use_template": False, "sampler_type": "greedy", "max_new_tokens": NUM_TOKENS}
    native.set_config(own)
    native.load()
    texts = [
        f"{number} w{260 + number} and then " + "some more words " * number for number in range(NUM_PROMPTS)
    ]
    ours = [said(runtime.generate(text, temperature=0.0, max_tokens=NUM_TOKENS)) for text in texts]
    assert ours == [native.response(text, False) for text in texts]
    assert len(set(ours)) > NUM_PROMPTS // 2


@pytest.mark.long
def test_one_slot_serves_all_in_turns(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: work that gives way is computed again from its tokens, and its text goes on as if it had not."""
    launch = MnnBackend.launch

    def unhurried(mnn: MnnBackend, plan: BatchPlan) -> Computed:
        """As a model of some size: this one is through with the whole job before a person can ask."""
        time.sleep(STEP_S)
        return launch(mnn, plan)

    monkeypatch.setattr(MnnBackend, "launch", unhurried)
    told: list[object] = []
    ask = partial(runtime.generate, "a long job", temperature=0.0, max_tokens=800)
    alone = said(ask())
    job = iter(ask(priority="background", on_notice=told.append))
    begun = next(job).text
    assert said(runtime.generate("a person", temperature=0.0, max_tokens=4, priority="interactive"))
    assert begun + said(job) == alone
    forms = [notice.form for notice in told if isinstance(notice, Parked)]
    assert set(forms) == {"tokens"}


def test_the_next_request_goes_on_from_what_is_held(runtime: Runtime) -> None:
    """X2, SPEC C1: a conversation's next turn computes what is new of it."""
    first = runtime.ask("One two three four five six seven eight nine ten.", temperature=0.0, max_tokens=8)
    again = runtime.ask("One two three four five six seven eight nine ten.", temperature=0.0, max_tokens=8)
    assert again.text == first.text
    assert again.usage.cached_tokens > 40


def test_its_one_slot_and_its_missing_parts_are_told(runtime: Runtime) -> None:
    """X2, SPEC K7: more slots than it can have become one; constraints are ours, scores would be MNN's."""
    (model,) = runtime.models
    assert (model.num_slots, model.n_batch > 1) == (1, True)
    assert model.label.startswith("MNN · ")
    assert said(runtime.generate("Say", regex="ab[0-9]{3}", temperature=0.0)).startswith("ab")
    with pytest.raises(UnsupportedError, match="scores no texts"):
        runtime.choose("Which?", ["one", "two"])
    with pytest.raises(UnsupportedError, match=r"does not support embeddings$"):  # no state is advised either
        runtime.embed("Which?")
    with pytest.raises(UnsupportedError, match=r"it has no vision \(\w+\)$"):  # nor a projector
        said(runtime.chat([{"role": "user", "content": "What?"}], images=[PIL.Image.new("RGB", (8, 8))]))


@pytest.mark.parametrize("damage", ["lacks a file", "ends its process"])
def test_a_folder_that_cannot_be_used_gives_way_to_its_twin(tmp_path: Path, damage: str) -> None:
    """X1, K9: what it lacks, or what a trial of this folder found, is told of the model that answers."""
    folder = tiny_mnn_folder(tmp_path / "model", main=ATTENTION_MAIN if damage == "lacks a file" else 97)
    if damage == "lacks a file":
        (folder / "llm.mnn.weight").unlink()
    table = {"file": str(folder), "fallback": "fake:id=twin", "load": True}
    places = {"cache_dir": tmp_path / "cache", "models_dir": tmp_path / "models", "run_dir": tmp_path / "run"}
    settings = EngineSettings(model_tables={"m": table}, isolation="thread", **places)
    with Runtime(settings=settings) as runtime:
        assert said(runtime.generate("Say: ", temperature=0.0, max_tokens=3))
        (model,) = runtime.models
        assert (model.backend, model.path) == ("fake", "fake:id=twin")
        reason = "it lacks llm.mnn.weight" if damage == "lacks a file" else "died of SIGSEGV"
        assert reason in model.backend_reason
        assert "mnn" in model.backend_reason
