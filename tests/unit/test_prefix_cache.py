"""Stored prefixes: which are found, who has to go, what is ordered of the disk, what the ledger says."""

import hashlib
from collections import Counter
from random import Random

import pytest

from stoker.cache.disk.tier import BUSY_SETTLE_S, RETRY_S, SETTLE_S, Read, Remove, Write
from stoker.cache.entry import Entry, EntryIndex, EntryState, Line
from stoker.cache.prefix_cache import MAX_ENTRIES, CacheLimits, PrefixCache
from stoker.cache.radix import Namespace, image_ids, key_of
from stoker.machine.ledger import Ledger

SPACE, OTHER = b"a" * 32, b"b" * 32
TOKEN_BYTES = 10
"""What a token's state takes here."""
HEAD_BYTES = 7
"""What a file takes beyond its state."""
PLENTY = 10**6
CHANGES = (
    *("store", "park", "filled", "failed", "settle", "lease", "used", "drop", "damaged"),
    *("found", "tend", "fetch", "written", "unwritten", "files_lost", "fetched", "unreadable", "shed"),
)


def _checked(name):
    def change(self, *args, **kwargs):
        result = getattr(PrefixCache, name)(self, *args, **kwargs)
        self.check()
        return result

    return change


Checked = type("Checked", (PrefixCache,), {name: _checked(name) for name in CHANGES})


def span(start, count):
    """`count` tokens that follow one another."""
    return list(range(start, start + count))


def entry_of(tokens, space=SPACE, size=None, **fields):
    """An entry that nobody has taken in yet."""
    size = len(tokens) * TOKEN_BYTES if size is None else size
    return Entry(space, "model", "/model.gguf", key_of(tokens), size, **fields)


class Store:
    """A cache that is looked over after each change, and the files of its disk."""

    def __init__(self, ram=PLENTY, disk=0):
        self.ledger = Ledger()
        self.cache = Checked(CacheLimits(ram_bytes=ram, disk_bytes=disk), self.ledger)
        self.files = {}
        self.num_written = 0

    def put(self, tokens, now=0.0, space=SPACE, size=None, **fields):
        """Store and fill; None: it was not taken."""
        is_wanted = fields.pop("is_wanted", False)
        entry = self.cache.store(entry_of(tokens, space, size, **fields), now, is_wanted=is_wanted)
        if entry is not None:
            self.cache.filled(entry, bytes(entry.size_bytes), now)
        return entry

    def park(self, tokens, holder="one", now=0.0, limit=PLENTY, **fields):
        """Park and fill."""
        entry = self.cache.park(entry_of(tokens, **fields), holder, limit, now)
        if entry is not None and entry.state is EntryState.PENDING:
            self.cache.filled(entry, bytes(entry.size_bytes), now)
        return entry

    def best(self, tokens, space=SPACE, *, is_exact=False):
        """The hit that saves the most of these tokens."""
        return next(iter(self.cache.index.find(space, key_of(tokens), is_exact=is_exact)), None)

    def length(self, tokens, space=SPACE, *, is_exact=False):
        """Tokens of these that are found."""
        hit = self.best(tokens, space, is_exact=is_exact)
        return 0 if hit is None else hit.num_tokens

    def orders(self, now):
        """What is ordered at that time."""
        self.cache.tend(now)
        return self.cache.disk.take_ops()

    def carry_out(self, now):
        """Order and do all that is due."""
        while orders := self.orders(now):
            for order in orders:
                self.do(order, now)

    def do(self, order, now):
        """One order, as a disk without trouble does it."""
        match order:
            case Write(entry):
                self.num_written += 1
                name = f"file {self.num_written}"
                self.files[name] = bytes(entry.data)
                self.cache.written(entry, name, len(entry.data) + HEAD_BYTES)
            case Read(entry):
                self.cache.fetched(entry, self.files[entry.file], now)
            case Remove(file):
                del self.files[file]

    def on_disk(self, tokens, now=0.0, **fields):
        """An entry whose bytes are on disk only."""
        entry = self.put(tokens, now, **fields)
        self.carry_out(now + SETTLE_S)
        self.cache.shed(PLENTY, now + SETTLE_S)
        assert entry.state is EntryState.DISK
        return entry


def test_the_longest_shared_part_of_an_entry_serves_but_never_the_last_token_asked_for():
    """C2, C5: a model that can trim uses any length; one token is left to compute."""
    store = Store()
    store.put(span(0, 100))
    assert store.length(span(0, 100)) == 99
    assert store.length(span(0, 120)) == 100
    assert store.length(span(0, 50) + span(900, 50)) == 50
    assert store.length(span(900, 100)) == 0


def test_nothing_under_thirty_two_tokens_is_stored_or_found():
    """C2."""
    store = Store()
    assert store.put(span(0, 31), is_wanted=True) is None
    store.put(span(0, 100))
    assert store.length(span(0, 31) + span(900, 50)) == 0
    assert store.length(span(0, 32) + span(900, 50)) == 32
    assert store.length(span(0, 32)) == 0
    assert store.put(span(500, 32)) is not None


def test_a_model_that_cannot_go_back_is_served_by_entries_that_end_before_the_divergence():
    """C2: exactly, and not by the entry of the whole prompt, whose last token would be left over."""
    store = Store()
    for count in (40, 64, 128):
        assert store.put(span(0, count), is_exact=True) is not None
    assert store.length(span(0, 100) + span(900, 9), is_exact=True) == 64
    assert store.length(span(0, 128), is_exact=True) == 64
    assert store.length(span(0, 129), is_exact=True) == 128
    assert store.length([*span(0, 63), 900], is_exact=True) == 40
    assert store.length(span(0, 39) + span(900, 50), is_exact=True) == 0


def test_of_those_that_share_alike_one_in_memory_is_taken():
    """C7: what is on disk costs a read."""
    store = Store(disk=PLENTY)
    store.on_disk(span(0, 60) + span(100, 60))
    near = store.put(span(0, 60) + span(300, 60), 5.0)
    hit = store.best(span(0, 60) + span(500, 60))
    assert (hit.entry, hit.num_tokens) == (near, 60)


def test_namespaces_are_worlds_of_their_own():
    """C1: the same tokens are stored twice and found each in its own."""
    store = Store()
    one, two = store.put(span(0, 50)), store.put(span(0, 50), space=OTHER)
    assert one is not two
    assert store.length(span(0, 60), b"c" * 32) == 0
    store.cache.drop(OTHER, key_of(span(0, 50)))
    assert (store.length(span(0, 60)), store.length(span(0, 60), OTHER)) == (50, 0)


def test_a_full_memory_gives_up_what_was_used_longest_ago():
    """C7: among entries that save alike."""
    store = Store(ram=1500)
    entries = [store.put(span(1000 * at, 50), float(at)) for at in range(3)]
    store.cache.used(entries[0], 100.0)
    store.put(span(9000, 50), 101.0)
    assert [e.state is EntryState.GONE for e in entries] == [False, True, False]
    assert store.cache.ram_bytes == store.ledger.used(Line.CACHE) == 1500
    assert store.cache.stats()["cache_evicted_total"] == 1


def test_background_and_costly_bytes_go_before_fresh_ones():
    """C7: weighted by class and tokens saved a byte."""
    store = Store(ram=1500)
    store.put(span(0, 50), 0.0)
    job = store.put(span(1000, 50), 10.0, is_background=True)
    store.put(span(2000, 50), 20.0)
    store.put(span(3000, 50), 21.0)
    assert job.state is EntryState.GONE
    store = Store(ram=1500)
    store.put(span(0, 50), 0.0, size=500)
    bulky = store.put(span(1000, 40), 10.0, size=1000)
    store.put(span(2000, 50), 20.0)
    assert bulky.state is EntryState.GONE


def test_memory_that_is_just_enough_is_enough():
    """C7: nothing goes for what fits to the byte, beside free entries and beside leased ones."""
    store = Store(ram=1500)
    first, second = store.put(span(0, 50)), store.put(span(1000, 50))
    third = store.put(span(2000, 50))
    assert [entry.state for entry in (first, second, third)] == [EntryState.RAM] * 3
    first.lease("one")
    second.lease("two")
    assert store.put(span(3000, 50)) is not None
    assert third.state is EntryState.GONE
    assert store.put(span(4000, 51)) is None
    assert store.cache.ram_bytes == 1500


def test_leased_and_pending_entries_never_go():
    """C7: whatever wants their room; it is refused instead."""
    store = Store(ram=1000)
    leased = store.put(span(0, 50))
    leased.lease("me")
    pending = store.cache.store(entry_of(span(1000, 50)), 1.0)
    assert store.put(span(2000, 50), 2.0) is None
    assert store.cache.shed(PLENTY, 3.0) == 0
    store.cache.drop(SPACE, leased.key)
    assert (leased.state, pending.state) == (EntryState.RAM, EntryState.PENDING)
    store.cache.filled(pending, bytes(500), 4.0)
    store.cache.settle(leased, "me", 0.0)
    assert store.put(span(2000, 50), 5.0) is not None
    assert leased.state is EntryState.GONE


def test_what_does_not_fit_at_all_is_refused_and_costs_nobody_anything():
    """C7."""
    store = Store(ram=1000)
    kept = store.put(span(0, 50))
    assert store.put(span(1000, 101)) is None
    assert kept.state is EntryState.RAM
    assert Store(ram=0).put(span(0, 50)) is None


def test_an_entry_whose_bytes_are_more_than_reckoned_keeps_the_bound():
    """C7, C14: it is counted as it is, and something goes for it."""
    store = Store(ram=1000)
    old = store.put(span(0, 50), 0.0)
    entry = store.cache.store(entry_of(span(1000, 50)), 100.0)
    store.cache.filled(entry, bytes(600), 100.0)
    assert store.cache.ram_bytes <= 1000
    assert old.state is EntryState.GONE
    assert entry.size_bytes == 600


def test_an_export_that_fails_leaves_nothing_behind():
    """C14."""
    store = Store()
    entry = store.cache.store(entry_of(span(0, 50)), 0.0)
    assert store.cache.ram_bytes == 500
    store.cache.failed(entry)
    assert (store.cache.ram_bytes, len(store.cache), store.length(span(0, 60))) == (0, 0, 0)


def test_a_namespace_holds_at_most_256_entries():
    """C7: the one worth least goes, and none of another namespace."""
    store = Store()
    store.put(span(0, 40), 0.0, space=OTHER)
    first = store.put(span(0, 40), 1.0)
    for at in range(1, MAX_ENTRIES + 1):
        store.put(span(1000 * at, 40), 1.0 + at)
    assert Counter(entry.namespace for entry in store.cache.index) == {SPACE: MAX_ENTRIES, OTHER: 1}
    assert first.state is EntryState.GONE


@pytest.mark.parametrize("ram", [PLENTY, MAX_ENTRIES * 40 * TOKEN_BYTES])
def test_states_that_are_stored_together_cost_one_look_at_each_that_is_there(ram, monkeypatch):
    """C7: a crowd's states push out as many others; each used to be weighed against all there are."""
    store, looks = Store(ram=ram), Counter()
    for at in range(MAX_ENTRIES):
        store.put(span(1000 * at, 40), now=float(at))
    figures = EntryIndex.figures
    monkeypatch.setattr(EntryIndex, "figures", lambda *args: looks.update("1") or figures(*args))
    for at in range(64):
        entry = entry_of(span(1000 * at + 500, 40))
        assert PrefixCache.store(store.cache, entry, 1000.0) is entry
    assert len(store.cache) == MAX_ENTRIES
    assert looks["1"] <= MAX_ENTRIES + 4 * 64
    store.cache.check()


def test_entries_on_disk_count_for_the_bound_too_and_take_their_files_along():
    """C7."""
    store = Store(disk=PLENTY)
    first = store.on_disk(span(0, 40))
    file = first.file
    for at in range(1, MAX_ENTRIES + 1):
        store.put(span(1000 * at, 40), 100.0 + at)
    assert first.state is EntryState.GONE
    assert Remove(file) in store.orders(100.0)


def test_eviction_demotes_what_is_saved_and_a_fetch_promotes_it():
    """C7: down without a loss, up for whoever asks; what is not saved goes last."""
    store = Store(ram=1000, disk=PLENTY)
    saved = store.put(span(0, 50), 0.0)
    store.carry_out(SETTLE_S)
    store.cache.used(saved, 100.0)
    fresh = store.put(span(1000, 50), 0.0)
    store.put(span(2000, 50), 100.0)
    assert (saved.state, fresh.state) == (EntryState.DISK, EntryState.RAM)
    assert store.length(span(0, 60)) == 50
    store.cache.fetch(saved, "me")
    assert saved.state is EntryState.READING
    assert [type(order) for order in store.cache.disk.take_ops()] == [Read]
    store.cache.fetch(saved, "you")
    assert store.cache.disk.take_ops() == []
    store.cache.fetched(saved, store.files[saved.file], 101.0)
    assert (saved.state, saved.leases, saved.used_s) == (EntryState.RAM, {"me", "you"}, 101.0)
    assert store.cache.ram_bytes <= 1000


def test_a_prefix_that_is_on_disk_is_stored_again_from_cells():
    """C7: its bytes are at hand, so nobody reads; its file stays."""
    store = Store(disk=PLENTY)
    entry = store.on_disk(span(0, 50))
    assert store.put(span(0, 50), 9.0) is entry
    assert entry.state is EntryState.RAM
    assert entry.file in store.files
    store.carry_out(20.0)
    assert store.num_written == 1
    entry = store.cache.store(entry_of(span(0, 50)), 21.0)
    assert entry is None


def test_a_failed_export_of_what_is_on_disk_leaves_it_there():
    """C7."""
    store = Store(disk=PLENTY)
    entry = store.on_disk(span(0, 50))
    assert store.cache.store(entry_of(span(0, 50)), 9.0) is entry
    store.cache.failed(entry)
    assert entry.state is EntryState.DISK
    assert store.cache.ram_bytes == 0


def test_a_longer_entry_takes_the_place_of_a_shorter_one_when_its_bytes_are_there():
    """C7: not before, and not one that somebody needs."""
    store = Store()
    short, needed = store.put(span(0, 50)), store.put(span(0, 60))
    assert short.state is EntryState.GONE
    needed.lease("me")
    longer = store.cache.store(entry_of(span(0, 100)), 1.0)
    assert needed.state is EntryState.RAM
    store.cache.filled(longer, bytes(1000), 1.0)
    assert needed.state is EntryState.RAM
    assert store.put(span(0, 80)) is None
    assert store.length(span(0, 81)) == 80


def test_a_file_is_kept_until_the_longer_entry_is_written_too():
    """C7, C9: what a crash would lose stays until then."""
    store = Store(disk=PLENTY)
    short = store.put(span(0, 50), 0.0)
    store.carry_out(SETTLE_S)
    longer = store.put(span(0, 100), 5.0)
    assert short.state is EntryState.DISK
    assert list(store.files) == [short.file]
    store.carry_out(5.0 + SETTLE_S)
    assert short.state is EntryState.GONE
    assert list(store.files) == [longer.file]


def test_entries_of_a_model_that_cannot_go_back_stand_beside_each_other():
    """C2, C8: the longer one does not serve those who part earlier."""
    store = Store(disk=PLENTY)
    for count in (40, 50, 60):
        store.put(span(0, count), is_exact=True)
    store.carry_out(SETTLE_S)
    assert len(store.cache) == len(store.files) == 3
    assert store.cache.ram_bytes == 1500


def test_a_branch_is_stored_if_it_adds_an_eighth_and_thirty_two_tokens():
    """C7: its bytes repeat those before it; one that goes on from another is always worth it."""
    store = Store()
    store.put(span(0, 800))
    assert store.put(span(0, 700) + span(5000, 98)) is None
    assert store.put(span(0, 700) + span(5000, 100)) is not None
    assert store.put(span(0, 700) + span(6000, 98), is_wanted=True) is not None
    assert store.put(span(0, 801)) is not None
    store.put(span(20000, 60))
    assert store.put(span(20000, 50) + span(30000, 31)) is None
    assert store.put(span(20000, 50) + span(30000, 32)) is not None
    assert store.put(span(0, 70) + span(40000, 1), is_exact=True) is not None


def test_parked_bytes_have_a_line_and_a_bound_of_their_own():
    """Q4, C14."""
    store = Store(ram=500)
    stored = store.put(span(0, 50))
    parked = store.park(span(1000, 50), limit=600)
    assert store.ledger.lines() == {Line.CACHE: 500, Line.PARKED: 500}
    assert store.park(span(2000, 50), "two", limit=600) is None
    assert stored.state is EntryState.RAM
    assert store.cache.stats()["parked_bytes"] == 500
    assert store.cache.shed(PLENTY, 1.0) == 500
    assert parked.state is EntryState.RAM


def test_others_find_what_is_parked_but_not_what_is_private():
    """C1, C10: a private entry serves its holder alone, and ends with it."""
    store = Store(disk=PLENTY)
    store.park(span(0, 50))
    private = store.park(span(1000, 50), is_private=True)
    assert (store.length(span(0, 60)), store.length(span(1000, 60))) == (50, 0)
    assert private not in set(store.cache.index)
    store.cache.settle(private, "one", 1.0)
    assert private.state is EntryState.GONE
    assert store.cache.parked_bytes == 500
    store.carry_out(100.0)
    assert store.files == {}


def test_what_was_parked_becomes_an_ordinary_entry_if_there_is_room():
    """Q4, C7, C14: once its last holder is gone; its bytes change lines."""
    store = Store(disk=PLENTY)
    entry = store.park(span(0, 50), "one")
    assert store.park(span(0, 50), "two") is entry
    store.cache.settle(entry, "one", 1.0)
    assert store.ledger.lines() == {Line.PARKED: 500}
    store.cache.settle(entry, "two", 2.0)
    assert (store.cache.ram_bytes, store.cache.parked_bytes) == (500, 0)
    store.carry_out(2.0)
    assert store.files == {}
    store.carry_out(2.0 + SETTLE_S)
    assert len(store.files) == 1


def test_what_was_parked_goes_where_there_is_no_room_or_too_few_tokens():
    """C2, C7."""
    store = Store(ram=400)
    entry, few = store.park(span(0, 50)), store.park(span(1000, 31))
    store.cache.settle(entry, "one", 1.0)
    store.cache.settle(few, "one", 1.0)
    assert (len(store.cache), store.cache.parked_bytes, store.cache.ram_bytes) == (0, 0, 0)


def test_parking_takes_what_is_stored_already():
    """Q4: no second copy; it stays until its holder lets go, and is stored then as before."""
    store = Store(ram=1000)
    entry = store.put(span(0, 50))
    assert store.park(span(0, 50), limit=0) is entry
    assert store.cache.parked_bytes == 0
    assert store.cache.shed(PLENTY, 1.0) == 0
    store.cache.settle(entry, "one", 2.0)
    assert entry.state is EntryState.RAM
    assert store.cache.shed(PLENTY, 3.0) == 500


def test_parking_what_is_on_disk_or_on_its_way_from_there():
    """Q4: the first gets its bytes from the backend, the second is another's and a private copy is made."""
    store = Store(disk=PLENTY)
    entry = store.on_disk(span(0, 50))
    assert store.park(span(0, 50), "one", 5.0) is entry
    store.cache.settle(entry, "one", 6.0)
    store.cache.shed(PLENTY, 7.0)
    store.cache.fetch(entry, "reader")
    copy = store.park(span(0, 50), "two", 8.0)
    assert copy is not entry
    assert copy.is_private
    store.cache.fetched(entry, store.files[entry.file], 9.0)
    assert (store.cache.ram_bytes, store.cache.parked_bytes) == (500, 500)


def test_an_entry_is_written_after_it_has_stood_a_moment_and_one_at_a_time():
    """C7, C9: the next turn of a conversation would replace it."""
    store = Store(disk=PLENTY)
    one = store.put(span(0, 50), 10.0)
    two = store.put(span(1000, 50), 10.5)
    assert store.orders(10.0 + SETTLE_S - 0.01) == []
    assert store.cache.disk.next_due_s() == 10.0 + SETTLE_S
    assert store.orders(20.0) == [Write(one)]
    assert store.orders(20.0) == []
    assert store.cache.disk.next_due_s() is None
    assert store.cache.shed(PLENTY, 20.0) == 500
    assert (one.state, two.state) == (EntryState.RAM, EntryState.GONE)
    store.cache.written(one, "file", 507)
    assert store.cache.disk.is_idle
    assert (store.ledger.used(Line.DISK), store.cache.disk.used_bytes) == (507, 507)


def test_what_is_replaced_within_a_moment_is_never_written():
    """C7."""
    store = Store(disk=PLENTY)
    for turn in range(5):
        store.put(span(0, 100 + 10 * turn), turn * SETTLE_S / 2)
    store.carry_out(100.0)
    assert (store.num_written, len(store.files)) == (1, 1)


def test_the_disk_keeps_its_bound_and_makes_room_before_it_writes():
    """C7: the file worth least goes first."""
    store = Store(disk=1100)
    old, kept = store.put(span(0, 50), 0.0), store.put(span(1000, 50), 100.0)
    store.carry_out(200.0)
    file = old.file
    fresh = store.put(span(2000, 50), 300.0)
    assert store.orders(301.0) == [Remove(file), Write(fresh)]
    assert old.state is EntryState.RAM
    store.cache.written(fresh, "new", 507)
    assert store.cache.disk.used_bytes <= 1100
    assert kept.file is not None
    assert store.cache.status().num_unsaved == 1


def test_a_file_that_goes_for_room_takes_an_entry_along_that_has_nothing_else():
    """C7."""
    store = Store(disk=600)
    old = store.on_disk(span(0, 50))
    store.put(span(1000, 50), 300.0)
    store.carry_out(301.0)
    assert old.state is EntryState.GONE
    assert store.length(span(0, 60)) == 0
    assert len(store.files) == 1


def test_an_entry_worth_less_than_every_file_is_put_off():
    """C7: it is looked at again later."""
    store = Store(disk=600)
    kept = store.put(span(0, 50), 0.0)
    store.carry_out(1.0)
    store.cache.used(kept, 10.0)
    poor = store.put(span(1000, 50), 10.0, is_background=True)
    assert store.orders(11.0) == []
    assert kept.file in store.files
    assert store.cache.disk.next_due_s() == 11.0 + RETRY_S
    store.cache.used(poor, 2000.0)
    assert store.orders(2000.0) == [Remove(next(iter(store.files))), Write(poor)]


def test_an_entry_that_is_put_off_holds_up_nobody_behind_it():
    """C7: what is due can be written, and nothing is due that cannot: the engine would wait for no time."""
    store = Store(disk=600)
    kept = store.put(span(0, 50), 0.0)
    store.carry_out(1.0)
    store.cache.used(kept, 10.0)
    store.put(span(1000, 50), 10.0, is_background=True)
    assert store.orders(11.0) == []
    rich = store.put(span(2000, 59), 12.0, size=59)
    assert store.orders(12.0 + SETTLE_S) == [Write(rich)]


def test_at_the_end_an_entry_worth_less_than_every_file_is_not_looked_at_again():
    """C7: the engine would never end."""
    store = Store(disk=600)
    kept = store.put(span(0, 50), 0.0)
    store.carry_out(1.0)
    store.cache.used(kept, 10.0)
    poor = store.put(span(1000, 50), 10.0, is_background=True)
    disk = store.cache.disk
    disk.hurry()
    assert disk.next_to_write(11.0, is_busy=False) is poor
    disk.put_off(poor, 11.0)
    assert disk.next_to_write(11.0, is_busy=False) is None
    assert disk.is_idle


def test_nothing_is_removed_for_an_entry_that_is_not_written_then():
    """C7: it needs the room of two files, and is worth less than the second."""
    store = Store(disk=1100)
    store.put(span(0, 50), 0.0, is_background=True)
    good = store.put(span(1000, 50), 0.0, size=480)
    store.carry_out(1.0)
    store.cache.used(good, 10.0)
    store.put(span(2000, 60), 10.0, size=1000)
    store.carry_out(11.0)
    assert len(store.files) == 2


def test_a_leased_entry_holds_up_no_other_and_is_not_due():
    """C7, Q17: what a paused request will go on from may be leased for hours."""
    store = Store(disk=PLENTY)
    leased = store.put(span(0, 50), 0.0)
    store.park(span(0, 50), "paused", 0.5)
    other = store.put(span(1000, 50), 1.0)
    assert store.orders(5.0) == [Write(other)]
    store.cache.written(other, "file", 507)
    assert store.orders(5.0) == []
    due_s = store.cache.disk.next_due_s()
    assert due_s is None or due_s > 5.0
    store.cache.settle(leased, "paused", 6.0)
    assert store.orders(8.0) == [Write(leased)]


def test_at_the_end_everything_is_due_at_once_and_nothing_is_waited_for_that_will_not_be_written():
    """C6, C9."""
    store = Store(disk=600)
    kept = store.put(span(0, 50), 0.0)
    store.cache.disk.hurry()
    store.carry_out(0.0)
    assert kept.file in store.files
    store.cache.used(kept, 10.0)
    store.put(span(1000, 50), 10.0, is_background=True)
    store.cache.disk.hurry()
    store.carry_out(10.0)
    assert store.cache.disk.is_idle


def test_a_full_disk_ends_writing_and_loses_nothing_else():
    """C9: memory goes on, what is saved is read."""
    store = Store(disk=PLENTY)
    saved = store.on_disk(span(0, 50))
    one = store.put(span(1000, 50), 10.0)
    assert store.orders(12.0) == [Write(one)]
    store.cache.disk.write_failed(one, "the disk is full")
    two = store.put(span(2000, 50), 13.0)
    assert store.orders(99.0) == []
    assert (one.state, two.state, one.leases) == (EntryState.RAM, EntryState.RAM, set())
    assert store.cache.status().disk_problem == "the disk is full"
    assert store.cache.status().num_unsaved == 0
    assert store.cache.disk.is_idle
    store.cache.fetch(saved, "me")
    store.carry_out(100.0)
    assert saved.state is EntryState.RAM
    assert store.length(span(1000, 60)) == 50


def test_one_write_that_fails_is_given_up_and_the_next_is_tried():
    """C9."""
    store = Store(disk=PLENTY)
    one, two = store.put(span(0, 50), 0.0), store.put(span(1000, 50), 0.0)
    assert store.orders(2.0) == [Write(one)]
    store.cache.disk.write_failed(one, "")
    assert store.orders(2.0) == [Write(two)]
    assert store.cache.shed(500, 3.0) == 500
    assert (one.state, two.state) == (EntryState.GONE, EntryState.RAM)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_file_that_cannot_be_read_is_forgotten_and_counted_if_it_is_damaged(*, is_damaged):
    """C9: nobody is offered it again, whoever waited goes on without; one removed for room is no damage."""
    store = Store(disk=PLENTY)
    entry = store.on_disk(span(0, 50))
    store.cache.fetch(entry, "me")
    store.cache.unreadable(entry, is_damaged=is_damaged)
    store.cache.settle(entry, "me", 0.0)
    assert entry.state is EntryState.GONE
    assert store.length(span(0, 60)) == 0
    assert store.cache.stats()["cache_damaged_total"] == is_damaged
    assert store.cache.disk.used_bytes == 0
    assert store.put(span(0, 50), 9.0) is not None


def test_a_state_that_the_model_refuses_is_gone_from_memory_and_disk():
    """C9, K5."""
    store = Store(disk=PLENTY)
    entry = store.put(span(0, 50), 0.0)
    store.carry_out(2.0)
    file = entry.file
    entry.lease("me")
    store.cache.damaged(entry)
    assert store.length(span(0, 60)) == 0
    assert store.orders(3.0) == [Remove(file)]
    assert store.cache.ram_bytes == store.cache.disk.used_bytes == 0


def test_a_state_that_is_refused_while_it_is_written_does_not_stay_on_disk():
    """C9."""
    store = Store(disk=PLENTY)
    entry = store.put(span(0, 50), 0.0)
    assert store.orders(2.0) == [Write(entry)]
    store.cache.damaged(entry)
    store.cache.written(entry, "file", 507)
    assert store.orders(3.0) == [Remove("file")]
    assert store.cache.disk.used_bytes == 0


def test_files_that_somebody_else_removed_are_forgotten():
    """C9: what is in memory too stays."""
    store = Store(disk=PLENTY)
    gone = store.on_disk(span(0, 50))
    stays = store.put(span(1000, 50), 10.0)
    store.carry_out(20.0)
    store.cache.files_lost([gone.file, stays.file, "never known"])
    assert (gone.state, stays.state) == (EntryState.GONE, EntryState.RAM)
    assert store.cache.disk.used_bytes == 0
    assert (store.length(span(0, 60)), store.length(span(1000, 60))) == (0, 50)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_file_that_goes_while_it_is_read(is_read):
    """C9: its bytes may have come before; either way the books are right."""
    store = Store(disk=PLENTY)
    entry = store.on_disk(span(0, 50))
    store.cache.fetch(entry, "me")
    store.cache.files_lost([entry.file])
    if is_read:
        store.cache.fetched(entry, bytes(500), 9.0)
    else:
        store.cache.unreadable(entry)
    assert entry.state is (EntryState.RAM if is_read else EntryState.GONE)
    assert store.cache.disk.used_bytes == 0


def test_a_saved_state_larger_than_host_memory_may_hold_does_not_get_in():
    """C7, C14: a folder may come from a server with more memory."""
    store = Store(ram=400, disk=PLENTY)
    store.cache.found([entry_of(span(0, 50), file="old", file_bytes=507)], 0.0)
    hit = store.best(span(0, 60))
    if hit is not None and store.cache.can_fetch(hit.entry):
        store.cache.fetch(hit.entry, "me")
        store.cache.fetched(hit.entry, bytes(500), 1.0)
    assert store.cache.ram_bytes <= 400


def test_what_the_folder_held_is_known_from_then_on():
    """C9: found, counted, and not written again."""
    store = Store(disk=PLENTY)
    entry = entry_of(span(0, 50), file="old", file_bytes=507)
    store.cache.found([entry], 0.0)
    assert store.length(span(0, 60)) == 50
    status = store.cache.status()
    assert (status.num_entries, status.num_disk, status.num_ram, status.disk_bytes) == (1, 1, 0, 507)
    assert (status.ram_limit_bytes, status.disk_limit_bytes) == (PLENTY, PLENTY)
    assert store.orders(99.0) == []


def test_what_the_folder_held_of_something_computed_meanwhile_is_not_saved_twice():
    """C9: a request was quicker than the look at the disk."""
    store = Store(disk=PLENTY)
    known = store.put(span(0, 50), 0.0)
    store.cache.found([entry_of(span(0, 50), file="old", file_bytes=507)], 0.0)
    assert len(store.cache) == 1
    assert known.file == "old"
    assert store.orders(99.0) == []


def test_a_file_that_is_being_written_is_not_removed_as_an_old_one_of_its_name():
    """C9: names follow from tokens, so what a look at the disk finds may be the very file."""
    store = Store(disk=PLENTY)
    known = store.put(span(0, 50), 0.0)
    assert store.orders(99.0) == [Write(known)]
    store.cache.found([entry_of(span(0, 50), file="same", file_bytes=507)], 99.0)
    store.cache.written(known, "same", 507)
    assert known.file == "same"
    assert store.orders(200.0) == []
    assert store.cache.status().disk_bytes == 507


def test_a_write_waits_while_something_is_computed_unless_memory_is_short():
    """C7, C9: it would slow the steps down, but what memory gives up unwritten is lost."""
    store = Store(ram=1000, disk=PLENTY)
    first = store.put(span(0, 40))
    store.cache.tend(SETTLE_S, is_busy=True)
    assert store.cache.disk.take_ops() == []
    store.put(span(1000, 40), SETTLE_S)
    store.cache.tend(SETTLE_S, is_busy=True)
    assert store.cache.disk.take_ops() == [Write(first)]
    calm = Store(ram=1000, disk=PLENTY)
    late = calm.put(span(0, 40))
    calm.cache.tend(BUSY_SETTLE_S, is_busy=True)
    assert calm.cache.disk.take_ops() == [Write(late)]


def test_of_too_many_found_the_longest_unused_go():
    """C7: the bound of a namespace holds for what the folder held."""
    store = Store(disk=PLENTY)
    found = [
        entry_of(span(1000 * at, 40), file=f"{at}", file_bytes=407, used_s=1000.0 + at)
        for at in range(MAX_ENTRIES + 3)
    ]
    store.cache.found(found, 5000.0)
    removed = [order.file for order in store.cache.disk.take_ops() if isinstance(order, Remove)]
    assert removed == ["0", "1", "2"]
    assert len(store.cache) == MAX_ENTRIES


def test_memory_is_shed_saved_entries_first():
    """C14: about as much as is asked, and nobody's lease."""
    store = Store(disk=PLENTY)
    saved = store.put(span(0, 50), 0.0)
    store.carry_out(2.0)
    store.cache.used(saved, 50.0)
    fresh = store.put(span(1000, 50), 3.0)
    assert store.cache.shed(1, 60.0) == 500
    assert (saved.state, fresh.state) == (EntryState.DISK, EntryState.RAM)
    assert store.cache.shed(501, 60.0) == 500
    assert store.cache.ram_bytes == 0


def test_no_more_is_shed_than_was_asked():
    """C14: what one entry frees to the byte costs no second one."""
    store = Store()
    store.put(span(0, 50), 0.0)
    store.put(span(1000, 50), 1.0)
    assert store.cache.shed(500, 60.0) == 500


def test_no_part_of_a_namespace_runs_into_the_next():
    """C1, C11: a salt cannot be chosen so that another's adapter and salt come out."""
    parts = [
        ("m", "a", "", "b"),
        ("m", "ab", "", ""),
        ("m", "", "a", "b"),
        ("ma", "", "", "b"),
        ("m", "", "", "ab"),
    ]
    assert len({Namespace(*each).digest for each in parts}) == len(parts)


def test_a_state_is_fetched_only_into_memory_that_is_not_in_use():
    """C7: to the byte; one that is in memory already needs none."""
    store = Store(ram=1000, disk=PLENTY)
    saved = store.on_disk(span(0, 50))
    first = store.put(span(1000, 50), 10.0)
    first.lease("one")
    assert store.cache.can_fetch(saved)
    second = store.put(span(2000, 50), 10.0)
    second.lease("two")
    assert not store.cache.can_fetch(saved)
    assert store.cache.can_fetch(second)


def test_a_key_is_the_same_bytes_on_every_machine():
    """C9: four a token, the lowest first; pictures are numbers below zero."""
    assert key_of([1, 258, -2]) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 254, 255, 255, 255])
    stream = hashlib.shake_128(b"cat").digest(8)
    numbers = [int.from_bytes(stream[at : at + 4], "little") for at in (0, 4)]
    assert image_ids(b"cat", 2) == [-1 - (number >> 1) for number in numbers]


def test_the_status_tells_what_is_where():
    """C14, O1."""
    store = Store(disk=PLENTY)
    store.on_disk(span(0, 50))
    store.put(span(1000, 50), 10.0)
    status = store.cache.status()
    assert (status.num_entries, status.num_ram, status.num_disk, status.num_unsaved) == (2, 1, 1, 1)
    assert (status.ram_bytes, status.disk_bytes) == (500, 507)
    assert store.cache.stats()["cache_stored_total"] == 2


class History:
    """A cache under random changes, beside a plain list of everything that was ever given to it."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.is_exact = self.random.random() < 0.4
        ram, disk = self.random.choice([1500, 4000, PLENTY]), self.random.choice([0, 2500, PLENTY])
        self.store = Store(ram, disk)
        self.cache = self.store.cache
        self.given = []
        self.pending = []
        self.held = []
        self.orders = []
        self.now = 0.0

    def tokens(self):
        """Some way down one of few trunks, with branches at few places."""
        parts = [span(self.random.choice([0, 5000]), self.random.choice([20, 33, 40, 64]))]
        parts += [
            span(self.random.choice([100, 200]), self.random.choice([5, 32, 50]))
            for _ in range(self.random.randint(0, 2))
        ]
        return [token for part in parts for token in part]

    def change(self):
        """One thing that may happen."""
        self.now += self.random.choice([0.0, 0.3, 2.0])
        names = ["put", "put", "park", "end_pending", "settle", "fetch", "disk", "disk", "disk", "other"]
        getattr(self, self.random.choice(names))()

    def put(self):
        """An entry of something that ended."""
        tokens, space = self.tokens(), self.random.choice([SPACE, OTHER])
        new = entry_of(tokens, space, is_exact=self.is_exact, is_background=self.random.random() < 0.3)
        entry = self.cache.store(new, self.now, is_wanted=self.random.random() < 0.2)
        if entry is not None:
            self.given.append((space, tuple(tokens)))
            self.pending.append(entry)

    def park(self):
        """A holder's entry."""
        tokens, space = self.tokens(), self.random.choice([SPACE, OTHER])
        is_private = self.random.random() < 0.3
        new = entry_of(tokens, space, is_exact=self.is_exact, is_private=is_private)
        holder = f"holder {self.random.random()}"
        entry = self.cache.park(new, holder, 2000, self.now)
        if entry is None:
            return
        self.held.append((entry, holder))
        if not entry.is_private:
            self.given.append((space, tuple(tokens)))
        if entry.state is EntryState.PENDING and entry not in self.pending:
            self.pending.append(entry)

    def end_pending(self):
        """The bytes come, or do not."""
        for entry in self.pending:
            if self.random.random() < 0.8:
                size = entry.size_bytes + self.random.choice([0, 0, 40])
                self.cache.filled(entry, bytes(size), self.now)
            else:
                self.cache.failed(entry)
        self.pending = []

    def settle(self):
        """A holder lets go."""
        if self.held:
            entry, holder = self.held.pop(self.random.randrange(len(self.held)))
            if entry.state is not EntryState.PENDING:
                self.cache.settle(entry, holder, self.now)
            else:
                self.held.append((entry, holder))

    def fetch(self):
        """Somebody goes on from an entry, by way of the disk if need be."""
        hit = self.store.best(self.tokens(), is_exact=self.is_exact)
        if hit is not None and hit.entry.state is not EntryState.PENDING:
            holder = f"reader {self.random.random()}"
            self.cache.fetch(hit.entry, holder)
            self.held.append((hit.entry, holder))

    def disk(self):
        """Orders are taken, and the first of them ends well or not."""
        self.orders += self.store.orders(self.now)
        if not self.orders:
            return
        match self.orders.pop(0):
            case Write(entry) if self.random.random() < 0.2:
                self.cache.disk.write_failed(entry, self.random.choice(["", "", "full"]))
            case Read(entry) if self.random.random() < 0.3:
                self.cache.unreadable(entry)
            case order:
                self.store.do(order, self.now)

    def other(self):
        """Rarer things."""
        entries = [entry for entry in self.cache.index if entry.state is not EntryState.PENDING]
        if not entries:
            return
        entry = self.random.choice(entries)
        match self.random.randrange(4):
            case 0:
                self.cache.shed(self.random.choice([1, 1000]), self.now)
            case 1:
                self.cache.drop(entry.namespace, entry.key)
            case 2 if entry.state is EntryState.RAM and not entry.leases:
                self.cache.damaged(entry)
            case _:
                self.cache.used(entry, self.now)

    def look(self):
        """What is found is what a plain search through the list of entries finds."""
        entries = list(self.cache.index)
        assert {(e.namespace, e.key) for e in entries} <= {(s, key_of(t)) for s, t in self.given}
        tokens, space = self.tokens(), self.random.choice([SPACE, OTHER])
        key = key_of(tokens)
        best = max((self.usable(entry, key) for entry in entries if entry.namespace == space), default=0)
        hit = self.store.best(tokens, space, is_exact=self.is_exact)
        if hit is None:
            assert best == 0
            return
        assert hit.entry in entries
        assert not hit.entry.is_private
        assert hit.entry.state is not EntryState.GONE
        assert hit.entry.namespace == space
        assert hit.num_tokens == self.usable(hit.entry, key) == best

    def usable(self, entry, key):
        """Tokens an entry saves, worked out token by token."""
        shared = 0
        for at in range(0, min(len(key), len(entry.key)), 4):
            if key[at : at + 4] != entry.key[at : at + 4]:
                break
            shared += 1
        most = len(key) // 4 - 1
        if self.is_exact:
            shared = shared if shared == entry.num_tokens <= most else 0
        shared = min(shared, most)
        return shared if shared >= 32 else 0


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_any_history_finds_what_a_plain_list_finds(first):
    """C1, C2, C7, C14: the most that is there, never another's; the bounds hold all the way."""
    for seed in range(first, first + 20):
        history = History(seed)
        for _ in range(120):
            history.change()
            history.look()
            assert history.cache.parked_bytes <= 2000 + 40 * 20
        history.end_pending()
        for entry, holder in history.held:
            history.cache.settle(entry, holder, history.now)
        assert history.cache.parked_bytes == 0, f"seed {seed}"
        history.cache.shed(PLENTY, history.now)
        there = [e for e in history.cache.index if e.data or e.state is EntryState.READING]
        assert history.cache.ram_bytes == sum(entry.size_bytes for entry in there)
