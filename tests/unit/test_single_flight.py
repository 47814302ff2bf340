"""A prefix that several need is computed once, and whoever waits for it never waits for nothing."""

from random import Random

import pytest

import stepping
from stepping import alone
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.cache.disk.tier import Read, Write
from stoker.cache.prefix_cache import CacheLimits
from stoker.cache.radix import key_of
from stoker.errors import InvalidRequestError
from stoker.ipc.model import CacheMode
from stoker.ipc.request import FinishReason, Priority
from stoker.ipc.usage import CacheSource
from stoker.kv import prefix_source
from stoker.kv.ops import Schedule
from stoker.kv.sequence import ParkForm, SequenceKey, SequenceState

STEM = [65 + at % 26 for at in range(600)]
SPACE, OTHER = b"a" * 32, b"b" * 32
NUM_CELLS = 4096
S = SequenceState


class Machine(stepping.Machine):
    """With room for everybody. Disk orders are done at once while `has_disk`."""

    def __init__(self, *, is_recurrent=False, num_cells=NUM_CELLS, ram_bytes=2**24, disk_bytes=0, **limits):
        faults = FakeFaults(recurrent=is_recurrent)
        defaults = {
            "num_slots": 8,
            "park_bytes": 2**24,
            "target_step_s": 1000.0,
            "background_patience_s": 10_000.0,
        }
        super().__init__(
            FakeBackend(num_sequences=24, num_cells=num_cells, n_batch=128, faults=faults),
            CacheLimits(ram_bytes=ram_bytes, disk_bytes=disk_bytes),
            **defaults | limits,
        )
        self.files = {}
        self.has_disk = True

    def enter(self, stem, tail, num_tokens=3, **fields):
        """A request of its own for so many tokens after a part of the stem and a tail."""
        return self.enter_prompt(STEM[:stem] + [tail] * 8, num_tokens, **fields)

    def enter_prompt(self, prompt, num_tokens=3, **fields):
        """The same for any prompt."""
        return super().enter_prompt(prompt, num_tokens, **{"namespace": SPACE} | fields)

    def tend_disk(self):
        """Do what is ordered of the disk."""
        self.cache.tend(self.now)
        for order in self.cache.disk.take_ops() if self.has_disk else ():
            match order:
                case Write(entry):
                    name = f"file {len(self.files)}"
                    self.files[name] = bytes(entry.data)
                    self.cache.written(entry, name, len(entry.data))
                case Read(entry):
                    self.cache.fetched(entry, self.files[entry.file], self.now)

    def until(self, is_done, steps=2000):
        """Step until then."""
        for _ in range(steps):
            if is_done():
                return
            self.step()
        pytest.fail(f"not reached in {steps} steps: {self.sequences}, {self.scheduler.stats()}")

    def finish(self, *sequences):
        """Step until these have ended, each with the text it has alone, and all is at rest."""
        wanted = sequences or tuple(self.sequences)
        self.until(lambda: all(s.state is S.DONE for s in wanted))
        for sequence in wanted:
            if sequence.finish_reason is FinishReason.LENGTH:
                prompt = tuple(sequence.tokens[: sequence.num_prompt])
                assert sequence.tokens == alone(prompt, sequence.num_wanted), sequence

    def rest(self, steps=12):
        """Nothing is asked for a while."""
        for _ in range(steps):
            self.step()

    def drop_cells(self):
        """Everything that idle slots keep goes, stored."""
        self.rest()
        turn = Schedule()
        while self.scheduler.allocator.evict_oldest(turn.ops):
            pass
        self.carry_out(turn)
        self.check()

    @property
    def num_computed(self):
        """Prompt tokens computed so far."""
        return int(self.scheduler.prefix_statistics.stats()["prompt_tokens_computed_total"])


KINDS = pytest.mark.parametrize("is_recurrent", [False, True], ids=["decoder", "recurrent"])


@KINDS
@pytest.mark.parametrize("num_followers", [1, 6])
def test_newcomers_with_one_prefix_compute_it_once(is_recurrent, num_followers):
    """C4: beyond it each computes its own tail, and gets the text it has alone."""
    machine = Machine(is_recurrent=is_recurrent)
    for at in range(num_followers + 1):
        machine.enter(500, 100 + at)
    machine.finish()
    assert machine.num_computed == 500 + 8 * (num_followers + 1)
    followers = machine.sequences[1:]
    assert [s.num_cached for s in followers] == [500] * num_followers
    source = CacheSource.RAM if is_recurrent else CacheSource.SHARED
    assert {s.cache_source for s in followers} == {source}
    assert machine.sequences[0].cache_source is None


@KINDS
def test_those_who_come_while_it_is_computed_follow_too(is_recurrent):
    """C4: one step and two steps later; what is common is found by looking, not registered."""
    machine = Machine(is_recurrent=is_recurrent)
    for at in range(4):
        machine.enter(500, 100 + at)
        machine.step()
    machine.finish()
    assert machine.num_computed == 500 + 8 * 4


def test_followers_hold_nothing_and_keep_their_places():
    """C4: no cells, no slot; who comes later and shares nothing does not get the places they wait for."""
    machine = Machine(num_slots=3)
    leader, one, two = machine.enter(500, 100), machine.enter(500, 101), machine.enter(500, 102)
    stranger = machine.enter(0, 120)
    machine.step()
    assert leader.state is S.PREFILL
    assert 0 < leader.num_computed < 500
    assert [s.state for s in (one, two, stranger)] == [S.QUEUED] * 3
    assert machine.backend.num_cells_used == leader.num_computed
    assert list(machine.scheduler.queue) == [one, two, stranger]
    machine.until(lambda: one.slot is not None)
    assert two.slot is not None
    assert stranger.slot is None
    assert leader.num_computed >= 500
    machine.finish()


def test_a_stranger_runs_beside_the_leader_where_there_are_places_for_all():
    """C4: only as many places are kept as there are followers."""
    machine = Machine(num_slots=3)
    machine.enter(500, 100)
    follower, stranger = machine.enter(500, 101), machine.enter(0, 120)
    machine.step()
    assert follower.slot is None
    assert stranger.slot is not None
    machine.finish()


def test_followers_go_on_as_soon_as_the_common_part_is_there():
    """C4: not at the end of the leader's prompt."""
    machine = Machine()
    leader = machine.enter_prompt(STEM[:200] + [90] * 900)
    follower = machine.enter_prompt(STEM[:200] + [91] * 8)
    nearly = machine.enter_prompt(STEM[:200] + [90] * 300)
    machine.step()
    assert follower.slot is None
    machine.until(lambda: follower.slot is not None)
    assert 200 <= leader.num_computed <= 200 + 2 * 128
    assert nearly.slot is None
    machine.finish()
    assert (follower.num_cached, nearly.num_cached) == (200, 499)
    assert machine.num_computed == 1100 + 8 + 1


@pytest.mark.parametrize(("stem", "num_computed"), [(31, 39 + 39), (32, 40 + 8)])
def test_too_short_a_prefix_is_not_waited_for(stem, num_computed):
    """C2, C4: thirty-one tokens are computed twice, thirty-two once."""
    machine = Machine(n_batch=32)
    machine.enter(stem, 100)
    machine.enter(stem, 101)
    machine.finish()
    assert machine.num_computed == num_computed


def end_leader(machine, leader, how):
    """Take the leader out of its prefill."""
    match how:
        case "cancelled":
            machine.scheduler.retire(leader, FinishReason.CANCELLED, machine.now)
        case "failed":
            machine.scheduler.retire(leader, FinishReason.ERROR, machine.now)
        case "paused":
            machine.scheduler.pause(leader, machine.now)
        case ParkForm():
            machine.carry_out(machine.scheduler.park(leader, how, machine.now))


@KINDS
@pytest.mark.parametrize("how", ["cancelled", "failed", "paused", *ParkForm])
def test_when_the_leader_goes_one_follower_takes_over_from_where_it_was(is_recurrent, how):
    """C4: the prefix costs once, and at most what the leader had computed again."""
    machine = Machine(is_recurrent=is_recurrent)
    leader = machine.enter(500, 100)
    followers = [machine.enter(500, 101 + at) for at in range(4)]
    machine.step()
    machine.step()
    half = leader.num_computed
    assert 0 < half < 500
    end_leader(machine, leader, how)
    machine.step()
    running = [s for s in followers if s.slot is not None]
    assert running == ([] if how in {ParkForm.CELLS, ParkForm.SNAPSHOT, ParkForm.TOKENS} else followers[:1])
    machine.finish(*followers)
    if how == "paused":
        machine.scheduler.resume(leader, machine.now)
    machine.finish()
    has_tail = how == "paused" or isinstance(how, ParkForm)
    least = 500 + 8 * (4 + has_tail)
    assert machine.num_computed <= least + half
    if how in {"cancelled", "failed"} and not is_recurrent:
        assert machine.num_computed == least
    assert followers[0].num_cached + machine.num_computed >= 500


def test_a_paused_leaders_cells_are_shared_by_who_takes_over():
    """C3, C4, Q17: what it has computed is not computed again while it stands still; nobody runs on it."""
    machine = Machine()
    leader = machine.enter(500, 100)
    follower = machine.enter(500, 101)
    machine.step()
    half = leader.num_computed
    machine.scheduler.pause(leader, machine.now)
    machine.step()
    assert (follower.num_cached, follower.cache_source) == (half, CacheSource.LIVE)
    machine.finish(follower)
    machine.scheduler.resume(leader, machine.now)
    machine.finish()
    assert machine.num_computed == 500 + 8 + 500 - half + 8


def test_a_leader_that_somebody_waits_for_is_not_background():
    """C4, Q3: it does not give way to interactive arrivals until the common part is there."""
    machine = Machine(num_slots=2)
    leader = machine.enter(500, 100, priority=Priority.BACKGROUND)
    machine.step()
    follower = machine.enter(500, 101)
    machine.step()
    assert not leader.is_background
    machine.enter(0, 120)
    machine.enter(0, 121)
    machine.step()
    assert leader.num_preemptions == 0
    machine.until(lambda: follower.slot is not None)
    machine.step()
    assert leader.is_background
    machine.finish()
    assert machine.num_computed == 500 + 8 * 4


def test_a_raised_leader_computes_at_the_pace_of_those_who_wait():
    """C4, Q8: background beside somebody's decode gets what the step's time leaves; a leader does not."""

    def prompt_tokens_a_step(priority):
        machine = Machine(target_step_s=0.012)
        for num_tokens in (1, 128) * 4:
            machine.scheduler.cost.learn(num_tokens, 0.002 + 0.002 * num_tokens)
        machine.enter(0, 120, num_tokens=400)
        machine.step()
        machine.step()
        leader = machine.enter(500, 100, priority=Priority.BACKGROUND)
        machine.step()
        machine.enter(500, 101, priority=priority)
        machine.step()
        before = leader.num_computed
        for _ in range(5):
            machine.step()
        return leader.num_computed - before

    assert prompt_tokens_a_step(Priority.INTERACTIVE) > prompt_tokens_a_step(Priority.BACKGROUND)


@pytest.mark.parametrize("how", ["cancelled", "paused", "failed"])
def test_a_leader_is_background_again_when_nobody_waits_any_more(how):
    """C4, Q3, Q7: also when the line is empty then."""
    machine = Machine()
    leader = machine.enter(500, 100, priority=Priority.BACKGROUND)
    machine.step()
    follower = machine.enter(500, 101)
    machine.step()
    assert not leader.is_background
    end_leader(machine, follower, how)
    machine.step()
    assert leader.state is S.PREFILL
    assert leader.is_background


def test_background_that_follows_raises_nobody():
    """C4, Q3."""
    machine = Machine()
    leader = machine.enter(500, 100, priority=Priority.BACKGROUND)
    machine.enter(500, 101, priority=Priority.BACKGROUND)
    machine.step()
    machine.step()
    assert leader.is_background
    machine.finish()
    assert machine.num_computed == 500 + 16


@KINDS
def test_what_is_not_to_be_shared_is_neither_followed_nor_used(is_recurrent):
    """C1, C10: another salt, `cache: false`, and a mode without cache compute alone."""
    machine = Machine(is_recurrent=is_recurrent)
    for namespace, shares in ((SPACE, True), (OTHER, True), (SPACE, False), (SPACE, False)):
        machine.enter(500, 100, namespace=namespace, shares=shares)
    machine.step()
    assert all(s.slot is not None for s in machine.sequences)
    machine.finish()
    machine.rest()
    late = [machine.enter(500, 100, namespace=b"c" * 32), machine.enter(500, 100, shares=False)]
    machine.finish()
    assert machine.num_computed == 6 * 508
    assert [s.num_cached for s in late] == [0, 0]
    assert [s.cache_source for s in machine.sequences] == [None] * 6


@pytest.mark.parametrize("mode", CacheMode)
def test_modes_say_where_what_was_computed_is_taken_from(mode):
    """C10, C13: cells only, stored states only, both, or nothing."""
    machine = Machine(cache_mode=mode)
    shares = mode is not CacheMode.OFF
    machine.enter(500, 100, shares=shares)
    machine.finish()
    machine.rest()
    again = machine.enter(500, 101, shares=shares)
    machine.finish()
    machine.drop_cells()
    late = machine.enter(500, 102, shares=shares)
    machine.finish()
    expected = {
        CacheMode.OFF: [None, None],
        CacheMode.LIVE: [CacheSource.LIVE, None],
        CacheMode.SNAPSHOT: [CacheSource.RAM, CacheSource.RAM],
        CacheMode.BOTH: [CacheSource.LIVE, CacheSource.RAM],
    }
    assert [again.cache_source, late.cache_source] == expected[mode]
    assert [s.num_cached for s in (again, late)] == [500 if source else 0 for source in expected[mode]]


def test_stored_states_alone_serve_a_crowd_too():
    """C4, C10: in the mode without shared cells one computes the prefix and the others wait for its state."""
    machine = Machine(cache_mode=CacheMode.SNAPSHOT)
    for at in range(4):
        machine.enter(500, 100 + at)
    machine.finish()
    assert machine.num_computed <= 500 + 8 * 4


@pytest.mark.parametrize("mode", [CacheMode.OFF, CacheMode.LIVE])
def test_a_model_that_cannot_share_cells_has_no_single_flight_without_states(mode):
    """C4, C10: nobody waits for what will not come."""
    machine = Machine(is_recurrent=True, cache_mode=mode)
    for at in range(3):
        machine.enter(500, 100 + at, shares=mode is not CacheMode.OFF)
    machine.step()
    assert all(s.slot is not None for s in machine.sequences)
    machine.finish()
    assert len(machine.cache) == 0


@pytest.mark.parametrize("length", [33, 130, 499])
def test_a_model_that_cannot_go_back_leaves_its_state_just_where_followers_part(length):
    """C4, C8: at any length, and several followers may part at several."""
    machine = Machine(is_recurrent=True)
    leader = machine.enter_prompt(STEM[:500])
    followers = [
        machine.enter_prompt([*STEM[:length], 1, 2, 3]),
        machine.enter_prompt([*STEM[:length], 4, 5]),
        machine.enter_prompt([*STEM[:400], 9]),
    ]
    machine.finish()
    assert leader.num_cached == 0
    assert [s.num_cached for s in followers] == [length, length, 400]
    assert machine.num_computed == 500 + 3 + 2 + 1


@KINDS
def test_an_exact_repeat_computes_its_last_token_only(is_recurrent):
    """C5: from cells or a checkpoint, and from a stored state when the cells are gone."""
    machine = Machine(is_recurrent=is_recurrent)
    for drop in (False, True):
        first = machine.enter(300, 100) if not drop else machine.sequences[0]
        machine.finish()
        if drop:
            machine.drop_cells()
        before = machine.num_computed
        again = machine.enter(300, 100)
        machine.finish()
        assert machine.num_computed == before + 1
        assert again.tokens == first.tokens
        assert again.num_cached == 307


@KINDS
def test_repeats_at_the_same_time_compute_the_prompt_once(is_recurrent):
    """C4, C5."""
    machine = Machine(is_recurrent=is_recurrent)
    for _ in range(5):
        machine.enter(300, 100)
    machine.finish()
    assert machine.num_computed == 308 + 4


def test_the_source_of_what_is_cached_is_told_as_it_was():
    """C13: live, shared, ram and disk, and the counters add up."""
    machine = Machine(disk_bytes=2**24)
    first = machine.enter(500, 100)
    second = machine.enter(500, 101)
    machine.finish()
    live = machine.enter(500, 102)
    machine.finish()
    machine.drop_cells()
    stored = machine.enter(500, 103)
    machine.finish()
    machine.drop_cells()
    machine.cache.shed(2**30, machine.now)
    saved = machine.enter(500, 104)
    machine.finish()
    sources = [s.cache_source for s in (first, second, live, stored, saved)]
    expected = [None, CacheSource.SHARED, CacheSource.LIVE, CacheSource.RAM, CacheSource.DISK]
    assert sources == expected
    assert [s.num_cached for s in machine.sequences] == [0, 500, 500, 500, 500]
    stats = machine.scheduler.prefix_statistics.stats()
    assert stats["prompt_tokens_total"] == 5 * 508
    assert stats["cache_misses_total"] == 1
    for source in expected[1:]:
        assert stats[f"cache_hits_{source}_total"] == 1
        assert stats[f"cached_tokens_{source}_total"] == 500
    assert stats["prompt_tokens_computed_total"] == 508 + 4 * 8


def test_an_admission_works_the_key_of_its_tokens_out_once(monkeypatch):
    """C2: it looks several times, and always for the tokens that there are then."""
    machine = Machine()
    machine.enter(500, 100)
    machine.finish()
    machine.drop_cells()
    lengths = []

    def counted(tokens):
        lengths.append(len(tokens))
        return key_of(tokens)

    monkeypatch.setattr(prefix_source, "key_of", counted)
    late = machine.enter(300, 101)
    machine.step()
    assert late.num_cached == 300
    assert lengths.count(308) == 1
    machine.finish()
    machine.drop_cells()
    allocator = machine.scheduler.allocator
    late.tokens = STEM[:400]
    assert allocator.stored(late, 0).num_tokens == 399
    late.tokens.append(STEM[400])
    assert allocator.stored(late, 0).num_tokens == 400
    late.tokens = [7] * 401
    assert allocator.stored(late, 0) is None


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_state_that_is_not_taken_counts_for_nothing(is_damaged):
    """C9, C13: cached 0, no source, the whole prompt computed; a damaged one is not offered again."""
    machine = Machine()
    machine.enter(500, 100)
    machine.finish()
    machine.drop_cells()

    def refuse(seq, data):
        del machine.backend.import_state
        raise InvalidRequestError("damaged") if is_damaged else MemoryError

    machine.backend.import_state = refuse
    late = machine.enter(500, 101)
    machine.finish()
    assert (late.num_cached, late.cache_source) == (0, None)
    assert machine.num_computed == 508 + 508
    assert machine.cache.stats()["cache_damaged_total"] == is_damaged
    stats = machine.scheduler.prefix_statistics.stats()
    assert stats["cache_misses_total"] == 2
    assert stats["cached_tokens_ram_total"] == 0


@KINDS
def test_who_waits_for_the_disk_is_neither_in_the_way_nor_forgotten(is_recurrent):
    """C4, C7: its place is kept, a stranger runs; another that wants the same waits for the same read."""
    machine = Machine(is_recurrent=is_recurrent, disk_bytes=2**24, num_slots=3)
    machine.enter(500, 100)
    machine.finish()
    machine.drop_cells()
    machine.cache.shed(2**30, machine.now)
    machine.has_disk = False
    one, two = machine.enter(500, 101), machine.enter(500, 102)
    stranger, late = machine.enter(0, 120), machine.enter(0, 121)
    machine.step()
    assert [s.slot is not None for s in (one, two, stranger, late)] == [False, False, True, False]
    machine.scheduler.retire(two, FinishReason.CANCELLED, machine.now)
    machine.finish(stranger, late)
    assert not machine.scheduler.has_work
    assert one.state is S.QUEUED
    entry = one.entry
    machine.has_disk = True
    machine.finish(one)
    assert one.cache_source is CacheSource.DISK
    assert one.num_cached == (500 if not is_recurrent else entry.num_tokens)


def on_disk_only(**limits):
    """A machine whose disk holds a prefix and answers no more for now."""
    machine = Machine(disk_bytes=2**24, **limits)
    machine.enter(500, 100)
    machine.finish()
    machine.drop_cells()
    machine.cache.shed(2**30, machine.now)
    machine.has_disk = False
    return machine


@pytest.mark.parametrize("has_stranger", [False, True])
def test_more_than_there_are_places_for_wait_for_the_disk(has_stranger):
    """C4, C7, Q15: with every place kept for those who wait for a read there is nothing to do."""
    machine = on_disk_only(num_slots=2)
    crowd = [machine.enter(500, 101 + at) for at in range(4)]
    if has_stranger:
        crowd.append(machine.enter(0, 120))
    machine.step()
    machine.step()
    assert not machine.scheduler.has_work
    assert all(s.state is S.QUEUED for s in crowd)
    machine.has_disk = True
    machine.finish()
    assert crowd[0].cache_source is CacheSource.DISK


def test_choices_wait_together_for_the_disk():
    """C7, Q15, Q16: the others are held by the one that is read for."""
    machine = on_disk_only()
    leader = machine.enter(500, 101, key=SequenceKey("one", 0))
    machine.enter(500, 101, key=SequenceKey("one", 1), leader=leader)
    machine.step()
    machine.step()
    assert not machine.scheduler.has_work
    machine.has_disk = True
    machine.finish()
    assert leader.cache_source is CacheSource.DISK


def test_background_that_is_owed_a_step_waits_for_the_disk_too():
    """C7, Q7: it is not computed from the start while its state is read."""
    machine = on_disk_only(background_patience_s=0.0, num_slots=1)
    machine.enter(0, 120, num_tokens=40)
    machine.step()
    job = machine.enter(500, 101, priority=Priority.BACKGROUND)
    for _ in range(5):
        machine.step()
    machine.has_disk = True
    machine.finish()
    assert job.cache_source is CacheSource.DISK


def test_a_read_that_fails_lets_those_who_waited_compute_it_once():
    """C4, C9."""
    machine = Machine(disk_bytes=2**24)
    machine.enter(500, 100)
    machine.finish()
    machine.drop_cells()
    machine.cache.shed(2**30, machine.now)
    machine.has_disk = False
    waiting = [machine.enter(500, 101 + at) for at in range(3)]
    machine.step()
    machine.cache.unreadable(waiting[0].entry)
    before = machine.num_computed
    machine.finish()
    assert machine.num_computed == before + 500 + 3 * 8
    assert [s.num_cached for s in waiting] == [0, 500, 500]


@KINDS
@pytest.mark.parametrize("shares", [True, False])
def test_choices_of_one_request_share_its_prompt(is_recurrent, shares):
    """Q16, C10: also of one that shares with nobody else, where the model can."""
    machine = Machine(is_recurrent=is_recurrent)
    leader = None
    for index in range(4):
        key = SequenceKey("one", index)
        sequence = machine.enter(400, 100, key=key, leader=leader, shares=shares)
        leader = leader or sequence
    machine.finish()
    if is_recurrent and not shares:
        assert machine.num_computed <= 4 * 408
    else:
        assert machine.num_computed == 408 + 3
    assert len({tuple(s.tokens) for s in machine.sequences}) == 1


def drive(seed):
    """One history of a crowd whose leaders go, at any step and in any way."""
    random = Random(seed)
    machine = Machine(
        is_recurrent=random.random() < 0.5,
        num_slots=random.choice([1, 2, 4]),
        n_batch=random.choice([16, 40, 128]),
        cache_mode=random.choice([CacheMode.BOTH, CacheMode.BOTH, *CacheMode]),
        disk_bytes=random.choice([0, 2**20]),
        ram_bytes=random.choice([0, 3000, 2**24]),
        park_bytes=random.choice([0, 2**24]),
        num_cells=random.choice([700, NUM_CELLS]),
    )
    shares = machine.scheduler.limits.cache_mode is not CacheMode.OFF
    for _ in range(random.randint(3, 8)):
        for _ in range(random.choice([0, 1, 3])):
            machine.step()
        prompt = STEM[: random.choice([0, 40, 200, 200, 300])] + [random.randint(97, 122)] * 5
        machine.enter_prompt(
            prompt,
            random.randint(1, 6),
            priority=random.choice(list(Priority)),
            namespace=random.choice([SPACE, SPACE, SPACE, OTHER]),
            shares=shares and random.random() < 0.9,
        )
        leaders = [s for s in machine.scheduler.slots.running if s.state is S.PREFILL]
        if leaders and random.random() < 0.6:
            how = random.choice(["cancelled", "failed", "paused", *ParkForm])
            end_leader(machine, random.choice(leaders), how)
    for _ in range(30):
        machine.step()
    for sequence in list(machine.scheduler.paused):
        machine.scheduler.resume(sequence, machine.now)
    machine.finish()
    return machine


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_nobody_hangs_whatever_becomes_of_the_leaders(first):
    """C4, Q15: every survivor has the text it has alone, and no lease is left."""
    for seed in range(first, first + 50):
        try:
            machine = drive(seed)
        except BaseException as error:
            raise AssertionError(f"the history of seed {seed} ends wrong") from error
        assert not any(set(entry.leases) - {"disk"} for entry in machine.cache.index), seed
        assert machine.cache.parked_bytes == 0, seed
