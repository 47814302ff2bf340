"""The table of models' lives, whose turn it is to go, and the pace of swaps: no engine, no clock."""

import pytest

from stoker.engine.residency.catalogue import (
    FINISH_S,
    STAY_S,
    STORY_LENGTH,
    SWAP_AFTER_S,
    Catalogue,
    ServedModel,
    Swaps,
)
from stoker.errors import ModelNotFoundError
from stoker.ipc.model import MODEL_MOVES, ModelLife, ModelSpec


def served(name="m", life=ModelLife.READY, **fields):
    """A served model in that state."""
    made = ServedModel(ModelSpec(id=name, path="fake:"), **fields)
    made.life = life
    return made


# ---------------------------------------------------------------- lives


@pytest.mark.parametrize("life", ModelLife)
def test_only_the_moves_of_the_table_are_made(life):
    """SPEC L1: one transition table."""
    for other in ModelLife:
        model = served(life=life)
        if other in MODEL_MOVES[life]:
            model.move(other, "why")
            assert (model.life, model.reason) == (other, "why")
        else:
            with pytest.raises(AssertionError, match=f"cannot become {other}"):
                model.move(other)
            assert model.life is life


def test_every_state_can_be_left_and_reached():
    """SPEC L1: no dead ends; in memory comes only what was loaded."""
    assert set(MODEL_MOVES) == set(ModelLife)
    assert all(MODEL_MOVES.values())
    assert set().union(*MODEL_MOVES.values()) == set(ModelLife)
    assert {life for life, to in MODEL_MOVES.items() if ModelLife.READY in to} == {
        ModelLife.LOADING,
        ModelLife.UNLOADING,
    }


def test_a_move_forgets_how_far_the_load_had_come_and_is_remembered_itself():
    """SPEC L1, and the story of a bug report is bounded."""
    model = served(life=ModelLife.ABSENT)
    for _ in range(STORY_LENGTH):
        model.move(ModelLife.LOADING)
        model.stage, model.fraction = "weights", 0.5
        model.move(ModelLife.ABSENT, "cancelled")
        assert (model.stage, model.fraction) == ("", 0.0)
    assert list(model.story)[-2:] == ["loading", "absent: cancelled"]
    assert len(model.story) == STORY_LENGTH


@pytest.mark.parametrize("life", ModelLife)
def test_what_is_ready_or_on_its_way_out_takes_memory(life):
    """SPEC R3."""
    assert served(life=life).is_in_memory == (life in {ModelLife.READY, ModelLife.UNLOADING})


# ---------------------------------------------------------------- how long one stays


def test_a_model_is_due_when_it_was_idle_for_as_long_as_it_may():
    """SPEC R8."""
    assert served(keep_alive_s=60.0, used_s=100.0).due_s() == 160.0
    assert served(keep_alive_s=0.0, used_s=100.0, has_served=True).due_s() == 100.0


def test_some_are_never_due():
    """SPEC R8, R3: kept for good, pinned, not ready, or loaded for what is about to come."""
    assert served(keep_alive_s=-1.0, has_served=True).due_s() is None
    assert served(keep_alive_s=60.0, is_pinned=True).due_s() is None
    assert served(keep_alive_s=0.0).due_s() is None
    for life in set(ModelLife) - {ModelLife.READY}:
        assert served(life=life, keep_alive_s=60.0).due_s() is None


# ---------------------------------------------------------------- the catalogue


def test_a_model_that_is_known_stays_as_it_is():
    """SPEC R3: made known again, it keeps its settings and its pin."""
    catalogue = Catalogue()
    first = catalogue.know(ModelSpec(id="m", path="fake:", is_pinned=True, keep_alive_s=5.0))
    assert catalogue.know(ModelSpec(id="m", path="fake:other")) is first
    assert (first.spec.path, first.is_pinned, first.keep_alive_s) == ("fake:", True, 5.0)


def test_an_unknown_model_is_refused_with_what_there_is():
    """SPEC S3."""
    catalogue = Catalogue()
    with pytest.raises(ModelNotFoundError, match="served: none"):
        catalogue.get("m")
    catalogue.know(ModelSpec(id="a", path="fake:"))
    catalogue.know(ModelSpec(id="b", path="fake:"))
    with pytest.raises(ModelNotFoundError, match="served: a, b"):
        catalogue.get("m")
    assert catalogue.find("m") is None


def test_those_in_memory_come_in_the_order_of_their_last_use():
    """SPEC R3: the first to go first."""
    catalogue = Catalogue()
    for name, used_s, life in (
        ("new", 30.0, ModelLife.READY),
        ("old", 10.0, ModelLife.READY),
        ("out", 5.0, ModelLife.ABSENT),
        ("going", 20.0, ModelLife.UNLOADING),
    ):
        model = catalogue.know(ModelSpec(id=name, path="fake:"))
        model.used_s, model.life = used_s, life
    assert [s.spec.id for s in catalogue.in_memory()] == ["old", "going", "new"]


def test_the_overdue_are_those_whose_time_has_come():
    """SPEC R8: at that moment, not after it."""
    catalogue = Catalogue()
    for name, used_s in (("early", 0.0), ("just", 40.0), ("late", 41.0)):
        model = catalogue.know(ModelSpec(id=name, path="fake:", keep_alive_s=60.0))
        model.used_s, model.life = used_s, ModelLife.READY
    assert [s.spec.id for s in catalogue.overdue(100.0)] == ["early", "just"]


# ---------------------------------------------------------------- swaps


def test_a_busy_model_is_left_alone_for_a_moment():
    """SPEC R3: an idle one may be found before."""
    swaps, busy = Swaps(), [served("a")]
    assert swaps.choose(busy, "n", begun_s=100.0, now=100.0 + SWAP_AFTER_S - 0.1) is None
    assert swaps.choose(busy, "n", begun_s=100.0, now=100.0 + SWAP_AFTER_S) is busy[0]


def test_the_one_in_memory_for_longest_goes_and_one_only_for_each_newcomer():
    """SPEC R3: equals take turns."""
    swaps = Swaps()
    busy = [served("b", loaded_s=50.0), served("a", loaded_s=20.0), served("c", loaded_s=30.0)]
    assert swaps.choose(busy, "n", 0.0, 100.0).spec.id == "a"
    assert swaps.choose(busy, "n", 0.0, 200.0) is None
    swaps.gone("a")
    assert swaps.choose(busy[:1] + busy[2:], "n", 0.0, 200.0).spec.id == "c"


def test_a_model_stays_for_a_while_once_it_is_in():
    """SPEC L5: or the machine would do nothing but load; a costly load buys a longer stay."""
    swaps = Swaps()
    quick = served("quick", loaded_s=100.0, load_took_s=0.01)
    slow = served("slow", loaded_s=90.0, load_took_s=3.0)
    assert swaps.choose([quick, slow], "n", 0.0, 100.0 + STAY_S - 0.1) is None
    assert swaps.choose([slow], "n", 0.0, 119.9) is None
    assert swaps.choose([slow], "n", 0.0, 120.0) is slow


def test_what_runs_may_take_its_time_and_no_longer():
    """SPEC R3, L5."""
    swaps = Swaps()
    swaps.choose([served("a")], "n", 0.0, 100.0)
    swaps.choose([served("b")], "o", 0.0, 105.0)
    assert swaps.overdue(100.0 + FINISH_S - 0.1) == []
    assert swaps.overdue(100.0 + FINISH_S) == [("a", "n")]
    swaps.gone("a")
    assert swaps.overdue(105.0 + FINISH_S) == [("b", "o")]
    swaps.gone("nobody")


def test_those_that_were_to_go_for_one_that_is_not_needed_may_stay():
    """SPEC R3."""
    swaps = Swaps()
    swaps.choose([served("a")], "n", 0.0, 100.0)
    swaps.choose([served("b")], "o", 0.0, 100.0)
    assert swaps.called_off("n") == ["a"]
    assert swaps.called_off("n") == []
    assert swaps.overdue(1000.0) == [("b", "o")]
