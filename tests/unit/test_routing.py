"""Which machine takes a request (SPEC P)."""

import pytest

from stoker.errors import ModelNotFoundError, NoMachineError
from stoker.ipc.request import Priority
from stoker.machine.ladder import Rung
from stoker.routing.hashing import conversation_parts, prefix_chain
from stoker.routing.load import ByClass, PeerState
from stoker.routing.peers import Peers, RouteRequest
from stoker.routing.router import Reason, Router

MODEL = "m"
SYSTEM = b"s" * 2000


def site(*names, **fields):
    """Machines that are alike."""
    peers = Peers()
    for name in names:
        peers.update(machine(name, **fields))
    return peers


def machine(name, **fields):
    """One with the model in memory."""
    return PeerState(name=name, **{"models": frozenset({MODEL}), "num_slots": 8, **fields})


def request(*turns, system=SYSTEM, **fields):
    """A conversation of so many turns."""
    parts = conversation_parts(system, [turn.encode() for turn in turns])
    return RouteRequest(model=MODEL, chain=prefix_chain(b"", parts), **fields)


def send(peers, asked, router=None):
    """Choose and begin."""
    choice = (router or Router()).choose(asked, peers, 0.0)
    peers.began(asked, choice.peer)
    return choice


class TestChains:
    """Hashes of what prompts begin with."""

    def test_a_longer_conversation_has_the_hashes_of_the_shorter_one(self):
        """P1: what a machine holds is found by the next turn."""
        first = request("hello").chain
        assert request("hello", "hi", "how are you").chain[: len(first)] == first

    def test_part_boundaries_namespaces_and_systems_keep_prompts_apart(self):
        """P1: equal bytes in other parts, or of another tenant, are another prompt."""
        chains = [
            prefix_chain(b"", [b"ab", b"c"]),
            prefix_chain(b"", [b"a", b"bc"]),
            prefix_chain(b"", [b"abc"]),
            prefix_chain(b"other", [b"ab", b"c"]),
        ]
        assert len({chain[-1] for chain in chains}) == len(chains)

    def test_a_short_system_prompt_counts_to_the_first_turn(self):
        """P1: conversations that share next to nothing have nothing in common for the ring."""
        assert request("a", system=b"be kind").chain[0] != request("b", system=b"be kind").chain[0]
        assert request("a").chain[0] == request("b").chain[0]
        assert conversation_parts(b"xy", [b"z"]) != conversation_parts(b"x", [b"yz"])


class TestAffinity:
    """What is computed is used again."""

    def test_a_conversation_goes_on_where_it_began_also_where_its_ring_place_is_another(self):
        """P2: the machine that took its first turn is remembered, not worked out again."""
        peers = site("a", "b", "c")
        first = send(peers, request("hello"))
        peers.ended(request("hello"), first.peer)
        for other in {"a", "b", "c"} - {first.peer}:
            peers.update(machine(other, num_slots=64))  # the ring is another now
        again = send(peers, request("hello", "hi", "and now"))
        assert again.peer == first.peer
        assert again.reason is Reason.WARM
        assert again.is_warm

    def test_a_door_that_was_restarted_finds_a_conversation_by_what_machines_tell(self):
        """P2: published prefixes stand for the memory of a door."""
        chain = request("hello").chain
        for holder in "abc":
            peers = site(*"abc")
            peers.update(machine(holder, prefixes=frozenset(chain[1:])))
            choice = Router().choose(request("hello", "hi", "more"), peers, 0.0)
            assert (choice.peer, choice.reason) == (holder, Reason.WARM)

    def test_a_session_holds_together_what_no_longer_begins_alike(self):
        """P2: a history that was shortened by its client goes to the same machine."""
        peers = site(*"abcdefgh")
        first = send(peers, request("one", session="s"))
        peers.ended(request("one", session="s"), first.peer)
        assert send(peers, request("short of it", system=b"", session="s")).peer == first.peer

    def test_doors_that_never_talked_choose_the_same_machine(self):
        """P2: places depend on names alone, not on the order in which machines came."""
        chosen = {
            Router().choose(request("hello"), site(*names), 0.0).peer for names in ("abcd", "dcba", "bdac")
        }
        assert len(chosen) == 1

    def test_what_is_forgotten_is_bounded(self):
        """P2: a door remembers so many beginnings and no more; the oldest go."""
        peers = Peers(max_remembered=4)
        peers.update(machine("a"))
        for number in range(10):
            asked = request(f"turn {number}")
            peers.began(asked, "a")
        assert "4 remembered" in repr(peers)
        assert peers.homes(asked.chain[-1]) == ("a",)
        assert peers.homes(request("turn 0").chain[-1]) == ()


class TestBounds:
    """No machine has much more than the others."""

    def test_a_viral_prefix_fills_its_own_places_and_stays_within_the_bound(self):
        """P3: load is within 1.1 of the mean, however many begin alike, so that there is room for others."""
        peers = site(*"abcdef")
        for number in range(120):
            send(peers, request(f"turn {number}"))
        loads = [peers.load(name, Priority.INTERACTIVE) for name in "abcdef"]
        assert sum(loads) == 120
        assert max(loads) <= 1.1 * 20

    @pytest.mark.parametrize("system", [SYSTEM, b""], ids=["alike", "each its own"])
    @pytest.mark.parametrize("slots", [(64, 64), (8, 56)], ids=["equal", "unequal"])
    def test_what_is_new_waits_for_no_slot_while_there_are_enough_for_all(self, system, slots):
        """P3: a crowd as large as all machines fills every slot; a line begins behind full ones only."""
        peers = Peers()
        for name, num_slots in zip("ab", slots, strict=True):
            peers.update(machine(name, num_slots=num_slots))
        for number in range(sum(slots)):
            send(peers, request(f"turn {number}", system=system))
        assert tuple(peers.load(name, Priority.INTERACTIVE) for name in "ab") == slots
        assert send(peers, request("one more", system=system)).reason is Reason.PLACE  # then as ever

    def test_a_viral_prefix_leaves_the_conversations_of_others_where_they_are(self):
        """P3: what is new spills over before what goes on does."""
        names = [f"m{number}" for number in range(6)]
        peers = site(*names)
        others = [
            (f"mine {number}", send(peers, request(f"mine {number}", system=b"")).peer)
            for number in range(60)
        ]
        for number in range(240):
            send(peers, request(f"viral {number}"))
        moved = 0
        for turn, home in others:
            peers.ended(request(turn, system=b""), home)
            choice = send(peers, request(turn, "answer", "next", system=b""))
            moved += choice.peer != home
        assert moved == 0

    def test_jobs_do_not_push_a_person_off_their_machine(self):
        """P4: the bound of each class counts that class alone."""
        peers = site(*"abc")
        first = send(peers, request("hello"))
        for number in range(60):
            peers.began(request(f"job {number}", priority=Priority.BACKGROUND), first.peer)
        again = Router().choose(request("hello", "hi", "more"), peers, 0.0)
        assert (again.peer, again.reason) == (first.peer, Reason.WARM)

    @pytest.mark.parametrize("has_chain", [True, False])
    def test_a_job_waits_for_no_slot_while_another_machine_has_one(self, has_chain):
        """P3, P4: what it would wait for is everybody, people and jobs."""
        peers = site(*"ab", num_slots=4)
        for name, num_people in (("a", 3), ("b", 1)):
            for number in range(num_people):
                peers.began(request(f"person {number}"), name)
        for name, num_jobs in (("a", 1), ("b", 1)):
            for number in range(num_jobs):
                peers.began(request(f"job {number} of {name}", priority=Priority.BACKGROUND), name)
        warm = request("job 0 of a", "more", priority=Priority.BACKGROUND)
        assert Router().choose(warm, peers, 0.0).peer == "b"  # though a has its beginning
        for _ in range(2):  # b has two slots
            for number in range(20):
                chain = request(f"new {number}", system=b"").chain if has_chain else ()
                asked = RouteRequest(model=MODEL, chain=chain, priority=Priority.BACKGROUND)
                assert Router().choose(asked, peers, 0.0).peer == "b"
            peers.began(asked, "b")

    def test_a_job_does_not_take_the_place_of_people_on_its_warm_machine(self):
        """P4: where people have every slot, a job goes elsewhere, though its prefix is there."""
        peers = site(*"abc")
        asked = request("job", priority=Priority.BACKGROUND)
        first = send(peers, asked)
        peers.ended(asked, first.peer)
        for number in range(8):
            peers.began(request(f"person {number}"), first.peer)
        assert Router().choose(asked, peers, 0.0).peer != first.peer

    def test_load_that_a_machine_told_counts_until_it_tells_again(self):
        """P3: what other doors sent is known by it, what this door began since is added."""
        peers = site(*"ab")
        peers.began(request("x"), "a")
        peers.update(machine("a", running=ByClass(interactive=5)))
        assert peers.load("a", Priority.INTERACTIVE) == 5
        peers.began(request("y"), "a")
        assert peers.load("a", Priority.INTERACTIVE) == 6
        peers.ended(request("x"), "a")
        peers.ended(request("y"), "a")
        assert peers.load("a", Priority.INTERACTIVE) == 4

    def test_requests_of_a_machine_that_was_taken_out_and_put_back_still_count(self):
        """P3: what is live there is live, and ends once."""
        peers = site(*"ab")
        for text in "xyz":
            peers.began(request(text), "a")
        peers.remove("a")
        peers.ended(request("x"), "a")
        peers.update(machine("a"))
        assert peers.load("a", Priority.INTERACTIVE) == 2
        peers.remove("a")
        peers.ended(request("y"), "a")
        peers.ended(request("z"), "a")
        peers.update(machine("a"))
        assert peers.load("a", Priority.INTERACTIVE) == 0

    def test_a_large_machine_gets_more_than_a_small_one(self):
        """P3: load is weighed by slots."""
        peers = site("small", num_slots=4)
        peers.update(machine("large", num_slots=16))
        for number in range(100):
            send(peers, request(f"turn {number}", system=b""))
        assert 70 <= peers.load("large", Priority.INTERACTIVE) <= 90


def test_a_thousand_machines_are_not_looked_at_for_a_request(monkeypatch):
    """P3: some sixteen are, of whatever load, and the states of no more than these."""
    peers = site(*(f"m{number}" for number in range(1000)), num_slots=4)
    looked, look = [], Peers.state

    def counted(self, name):
        looked.append(name)
        return look(self, name)

    monkeypatch.setattr(Peers, "state", counted)
    most = 0
    for number in range(3000):
        looked.clear()
        send(peers, request(f"viral {number}"))
        most = max(most, len(set(looked)))
    assert most <= 16


class TestWhoMayTakeIt:
    """States of machines."""

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"is_up": False}, "does not answer"),
            ({"is_draining": True}, "drained"),
            ({"is_suspended": True}, "suspended"),
        ],
    )
    def test_a_closed_machine_gets_nothing_and_the_refusal_says_why_of_each(self, fields, why):
        """P5: the others take its share, and without others the error names every machine."""
        peers = site(*"abc")
        home = send(peers, request("hello")).peer
        peers.update(machine(home, **fields))
        other = Router().choose(request("hello", "hi", "more"), peers, 0.0)
        assert other.peer != home
        for name in "abc":
            peers.update(machine(name, **fields))
        with pytest.raises(NoMachineError) as raised:
            Router().choose(request("hello"), peers, 0.0)
        assert raised.value.details["machines"].keys() == set("abc")
        assert all(why in text for text in raised.value.details["machines"].values())
        assert raised.value.message.count(why) == 3

    @pytest.mark.parametrize(
        "fields",
        [
            {"heat": "serious"},
            {"rungs": (Rung.TRIM_ALLOCATOR, Rung.PARK_INTERACTIVE)},
            {"interactive_wait_s": 60.0},
            {"free_cells": {MODEL: 10}},
            {"at": -60.0},
        ],
    )
    def test_a_hot_full_pressed_or_silent_machine_is_the_last_resort(self, fields):
        """P5: it gets nothing while another can take it, and is better than an error."""
        peers = site(*"abc")
        home = send(peers, request("hello")).peer
        peers.update(machine(home, **fields))
        asked = request("hello", "hi", "more", num_prompt_tokens=100)
        assert Router().choose(asked, peers, 0.0).peer != home
        for name in "abc":
            peers.update(machine(name, **fields))
        assert Router().choose(asked, peers, 0.0).reason is Reason.LAST_RESORT

    def test_memory_that_is_short_for_jobs_is_enough_for_people(self):
        """P5: each class has its own rung."""
        peers = site(*"ab")
        home = send(peers, request("hello")).peer
        peers.update(machine(home, rungs=(Rung.PAUSE_BACKGROUND,)))
        assert Router().choose(request("hello"), peers, 0.0).peer == home
        assert Router().choose(request("hello", priority=Priority.BACKGROUND), peers, 0.0).peer != home

    def test_one_that_failed_is_left_out(self):
        """P5: a request that is tried again goes elsewhere, and in the end is refused."""
        peers, tried = site(*"abc"), set()
        for _ in "abc":
            tried.add(Router().choose(request("hello"), peers, 0.0, exclude=tried).peer)
        assert tried == set("abc")
        with pytest.raises(NoMachineError, match="failed at this request"):
            Router().choose(request("hello"), peers, 0.0, exclude=tried)

    def test_a_model_that_is_nowhere_in_memory_goes_where_it_fits_best(self):
        """P6: and everybody who asks for it meanwhile goes there too."""
        peers = site(*"abc")
        for name, fit in (("a", 1e9), ("b", 5e9), ("c", -2e9)):
            peers.update(machine(name, available={"big": fit}))
        asked = [RouteRequest(model="big", chain=(number,)) for number in range(5)]
        assert {send(peers, one).peer for one in asked} == {"b"}
        choice = Router().choose(asked[0], peers, 0.0, exclude={"b"})
        assert (choice.peer, choice.reason) == ("a", Reason.LOADS)
        with pytest.raises(NoMachineError, match="c: the model does not fit there: 2000000000 bytes"):
            Router().choose(asked[0], peers, 0.0, exclude={"a", "b"})
        peers.update(machine("c", models=frozenset({"big"})))
        assert Router().choose(asked[0], peers, 0.0).peer == "c"

    def test_a_model_that_no_machine_has_is_the_callers_mistake(self):
        """P6: but only if every machine could be asked."""
        peers = site(*"ab")
        with pytest.raises(ModelNotFoundError):
            Router().choose(RouteRequest(model="other"), peers, 0.0)
        peers.update(machine("b", is_up=False))
        with pytest.raises(NoMachineError):
            Router().choose(RouteRequest(model="other"), peers, 0.0)
        with pytest.raises(NoMachineError, match="None of 0 machines"):
            Router().choose(RouteRequest(model="other"), Peers(), 0.0)
