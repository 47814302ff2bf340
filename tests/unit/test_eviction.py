"""What goes first when the cache is full, and which checkpoints of a sequence stay."""

from random import Random

import pytest

from stoker.cache.eviction import SETTLING_S, Candidate, VictimRanking, keep_value, victim, worth


def _candidate(*, num_saved=100, size_bytes=1000, idle_s=10.0, is_background=False):
    return Candidate(num_saved, size_bytes, idle_s, is_background)


def _chosen(*candidates):
    return victim(enumerate(candidates))


def test_nothing_is_chosen_among_nothing():
    """SPEC C7: when all is pinned nothing goes."""
    assert _chosen() is None


@pytest.mark.parametrize(
    "worse",
    [
        {"idle_s": 11.0},
        {"num_saved": 99},
        {"size_bytes": 1001},
        {"is_background": True},
    ],
)
def test_what_is_worth_less_in_one_respect_goes_first(worse):
    """SPEC C7: weighted by class, tokens saved a byte and recency."""
    assert _chosen(_candidate(), _candidate(**worse), _candidate()) == 1


def test_background_is_worth_half():
    """SPEC C7: a class has a weight, not precedence."""
    assert keep_value(_candidate(is_background=True)) == keep_value(_candidate()) / 2
    assert _chosen(_candidate(is_background=True), _candidate(idle_s=2 * (10 + SETTLING_S))) == 1


def test_what_saves_twice_as_much_may_be_idle_twice_as_long():
    """SPEC C7: recency is a weight as well."""
    fresh, rich = _candidate(idle_s=0.0), _candidate(num_saved=200, idle_s=SETTLING_S)
    assert keep_value(fresh) == keep_value(rich)


def test_an_entry_that_others_make_superfluous_goes_however_fresh():
    """SPEC C7: what saves no token is worth nothing."""
    assert _chosen(_candidate(idle_s=1e6), _candidate(num_saved=0, idle_s=0.0)) == 1


def test_equals_go_by_idleness_then_size_then_order():
    """SPEC C7: the choice is determined."""
    nothing = {"num_saved": 0}
    assert _chosen(_candidate(**nothing, idle_s=1.0), _candidate(**nothing, idle_s=2.0)) == 1
    assert _chosen(_candidate(**nothing, size_bytes=1), _candidate(**nothing, size_bytes=2)) == 1
    assert _chosen(_candidate(), _candidate()) == 0


def test_a_clock_set_back_and_an_empty_entry_do_no_harm():
    """SPEC C7: files carry the times of a wall clock."""
    assert keep_value(_candidate(idle_s=-1e9)) == keep_value(_candidate(idle_s=0.0))
    assert keep_value(_candidate(size_bytes=0)) > 0


@pytest.mark.parametrize("seed", range(20))
def test_a_ranking_names_what_a_look_at_all_would(seed):
    """SPEC C7: whoever goes, comes, is held, or becomes worth more or less meanwhile."""
    random = Random(seed)

    def anything():
        return worth(_candidate(num_saved=random.randint(0, 9), idle_s=float(random.randint(0, 3))))

    worths = {name: anything() for name in range(40)}
    ranking = VictimRanking(worths, worths.get)
    for name in range(40, 140):
        least = ranking.least()
        assert worths[least] == min(worths.values())
        match random.randrange(4):
            case 0:
                del worths[least]
            case 1:
                worths[name] = anything()
                ranking.enter(name)
            case 2:
                other = random.choice(list(worths))
                worths[other] = max(worths[other], anything())
            case 3:
                other = random.choice(list(worths))
                worths[other] = min(worths[other], anything())
                ranking.enter(other)
    assert VictimRanking([], worths.get).least() is None
