"""The simulator of a fleet, and what its router reaches in it (SPEC P)."""

from collections import deque
from dataclasses import replace
from itertools import islice

import pytest
from bench.errors import BenchError
from bench.fleet import main
from bench.fleet_costs import PRESETS, Costs, Steps, fitted, read
from bench.fleet_machine import JOBS, PEOPLE, Job, Machine, Pace, PrefixCache
from bench.fleet_play import Fleet, Plan, played
from bench.fleet_policies import POLICIES, Routed
from bench.fleet_real import arrivals, measured_figures
from bench.fleet_site import Answered, Frame
from bench.fleet_trace import PEOPLE as SHAPE
from bench.fleet_trace import Conversation, Next, Trace, Turn

from stoker.ipc.request import Priority
from stoker.routing.load import PeerState

SMALL = Plan(machines=4, requests=600, costs=PRESETS["cpu"], shape=replace(SHAPE, num_systems=12))
TIMES = {"router_us", "choose_p50_us", "choose_p99_us", "state_us", "router_share", "took_s"}


def conversation(number, priority=Priority.INTERACTIVE):
    """One with a first turn of 100 tokens."""
    talk = Conversation(number, priority, deque([Next(0.0, 20, 10)] * 9))
    talk.add(100)
    return talk


def asked(talk, answer=10):
    """Its next turn."""
    return Turn(talk, tuple(talk.chain), tuple(talk.tokens), answer, 0.0)


def hit_rate(num_machines):
    """Of 12 conversations of 5 turns, three at a time, on machines with room for all."""
    policy = Routed()
    names = [f"m{number}" for number in range(num_machines)]
    caches = {name: PrefixCache(10**6) for name in names}
    for name in names:
        policy.update(PeerState(name=name, models=frozenset({"model"}), num_slots=4))
    talks = [conversation(number) for number in range(12)]
    prompt = cached = 0
    live = []
    for _ in range(5):
        for talk in talks:
            turn = asked(talk)
            name = policy.choose(turn, 0.0)
            prompt += turn.num_prompt
            cached += sum(turn.tokens[: caches[name].held(turn.chain)])
            caches[name].used((*turn.chain, turn.answer_key), (*turn.tokens, turn.answer))
            talk.add(turn.answer)
            talk.add(20)
            live.append((turn, name))
            if len(live) == 3:
                policy.ended(*live.pop(0))
    return cached / prompt


def test_three_machines_find_nearly_as_much_computed_as_one():
    """P2: the hit rate of 12 conversations of 5 turns is at least 0.9 of one machine's."""
    one = hit_rate(1)
    assert one > 0.6
    assert hit_rate(3) >= 0.9 * one


@pytest.fixture(scope="module")
def results():
    """Every policy on the same requests."""
    return {policy: played(SMALL, policy) for policy in POLICIES}


def test_the_router_finds_more_and_answers_sooner_than_round_robin_and_least_loaded(results):
    """P2: what it is for."""
    routed = results["stoker"]
    for other in ("round_robin", "least_loaded"):
        assert routed["hit_rate"] > 1.5 * results[other]["hit_rate"]
        assert routed["first_token_p95_s"] < results[other]["first_token_p95_s"]
    assert routed["hit_rate"] <= routed["hit_rate_possible"]


def test_a_plan_repeats(results):
    """Equal seeds give equal figures, but for the time that the router took."""
    again = played(SMALL, "stoker")
    assert {name: again[name] for name in again.keys() - TIMES} == {
        name: results["stoker"][name] for name in again.keys() - TIMES
    }


def test_a_viral_beginning_costs_the_conversations_of_others_next_to_nothing():
    """P3: their hit rate is what it was."""
    plan = replace(SMALL, requests=1500)
    viral = played(replace(plan, shape=replace(plan.shape, viral=0.6)), "stoker")
    assert viral["hit_rate"] > viral["hit_rate_others"]
    assert viral["hit_rate_others"] >= 0.9 * played(plan, "stoker")["hit_rate_others"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_whatever_becomes_of_machines(policy):
    """Requests of machines that die, are drained or suspended go on elsewhere."""
    fleet = Fleet(replace(SMALL, machines=8, deaths=2, drains=2, suspends=2), POLICIES[policy]())
    found = fleet.play()
    assert sum(machine.num_served for machine in fleet.machines.values()) == SMALL.requests
    assert found["moved_alive"] > 0
    assert "600 asked, 0 live" in repr(fleet)


class TestMachine:
    """One machine, as its steps make it."""

    pace = Pace(Costs(steps=((1, 0.01), (8, 0.02), (512, 1.0))).table())

    def run(self, machine):
        """Until nothing runs; seconds and what ended."""
        ended = []
        while (now := machine.next_s()) is not None:
            ended += [(now, job) for job in machine.advance(now)]
        return ended

    def take(self, machine, *jobs):
        """They come at the same time."""
        for job in jobs:
            machine.take(job)
        machine.advance(0.0)

    def test_a_prompt_alone_is_read_in_whole_steps_and_answered_a_token_a_step(self):
        """A prompt of 1,024 takes two steps of 512, and nine more tokens nine steps."""
        machine, talk = Machine("m", self.pace, 2, 10**6), Conversation(1, Priority.INTERACTIVE)
        talk.add(1024)
        job = Job(asked(talk))
        self.take(machine, job)
        ((now, _),) = self.run(machine)
        assert job.first_s == pytest.approx(2.0)
        assert now == pytest.approx(2.0 + 9 * 0.01)

    def test_what_another_computes_is_waited_for(self):
        """Of two that begin alike the second finds what the first has computed."""
        machine, talk = Machine("m", self.pace, 2, 10**6), conversation(1)
        first, second = Job(asked(talk)), Job(asked(talk))
        self.take(machine, first, second)
        self.run(machine)
        assert (first.cached, second.cached) == (0, 100)

    def test_a_person_takes_the_slot_of_a_job_which_goes_on_later(self):
        """And every token is computed once."""
        machine = Machine("m", self.pace, 1, 10**6)
        job = Job(asked(conversation(1, Priority.BACKGROUND), answer=100))
        self.take(machine, job)
        machine.advance(job.turn.num_prompt / 512 + 0.05)
        person = Job(asked(conversation(2)))
        machine.take(person)
        now = machine.next_s()
        machine.advance(min(now, 0.3))
        assert (machine.num_running(PEOPLE), machine.num_waiting(JOBS)) == (1, 1)
        ended = [one for _, one in self.run(machine)]
        assert ended == [person, job]

    def test_a_person_takes_the_slot_of_a_job_whose_prompt_is_read_and_it_goes_on_from_there(self):
        """Q3: at once, in the middle of its prompt; what was read of it is not read again."""
        machine = Machine("m", self.pace, 1, 10**6)
        long = conversation(1, Priority.BACKGROUND)
        long.add(924)
        job, person = Job(asked(long)), Job(asked(conversation(2), answer=50))
        self.take(machine, job)
        machine.advance(1.0)
        machine.take(person)
        machine.advance(1.0)
        assert (machine.num_running(PEOPLE), machine.num_waiting(JOBS)) == (1, 1)
        ended = {one: now for now, one in self.run(machine)}
        assert person.first_s == pytest.approx(1.0 + 100 * 1.0 / 512, rel=0.05)
        assert job.first_s == pytest.approx(ended[person] + 1.0)

    def test_the_youngest_job_gives_way_and_what_was_parked_goes_on_before_newcomers(self):
        """Q3, Q6: as in the scheduler."""
        machine = Machine("m", self.pace, 2, 10**6)
        jobs = [Job(asked(conversation(number, Priority.BACKGROUND), answer=200)) for number in range(3)]
        self.take(machine, *jobs)
        machine.advance(1.0)
        person = Job(asked(conversation(9), answer=5))
        machine.take(person)
        machine.advance(1.0)
        assert [job.is_parked for job in jobs] == [False, True, False]
        assert [job for _, job in self.run(machine)] == [person, jobs[0], jobs[1], jobs[2]]

    def test_a_job_whose_prefix_a_person_waits_for_keeps_its_slot_until_it_is_read(self):
        """Q3, C4: parking it would make the person wait for what nobody computes."""
        machine, talk = Machine("m", self.pace, 1, 10**6), conversation(1)
        other = Conversation(1, Priority.BACKGROUND, chain=talk.chain, tokens=talk.tokens)
        job, person = Job(asked(other)), Job(asked(talk))
        self.take(machine, job)
        machine.advance(0.1)
        machine.take(person)
        machine.advance(0.1)
        assert machine.num_waiting(PEOPLE) == 1
        assert [one for _, one in self.run(machine)] == [person, job]
        assert (job.cached, person.cached) == (0, 100)
        assert job.first_s < person.first_s

    def test_nobody_waits_for_a_prefix_whose_job_is_parked(self):
        """C4: who needs it reads it, and the job finds its own part where it was."""
        machine, talk = Machine("m", self.pace, 1, 10**6), conversation(1)
        other = Conversation(1, Priority.BACKGROUND, chain=talk.chain, tokens=talk.tokens)
        leader, stranger, person = Job(asked(other)), Job(asked(conversation(8))), Job(asked(talk))
        self.take(machine, leader)
        machine.advance(0.1)
        for one in (stranger, person):
            machine.take(one)
            machine.advance(0.1)
        assert [one for _, one in self.run(machine)] == [stranger, person, leader]
        assert person.cached == 0

    def first_s(self, leader):
        """First token of a person beside one who writes, after a job or a person that begins alike."""
        machine, talk = Machine("m", self.pace, 4, 10**6), conversation(1)
        talk.add(2000)
        self.take(machine, Job(asked(conversation(3), answer=100_000)))
        now = machine.next_s()
        machine.advance(now)
        other, person = Conversation(1, leader, chain=talk.chain, tokens=talk.tokens), Job(asked(talk))
        for job in (Job(asked(other)), person):
            machine.take(job)
            machine.advance(now)
        self.run(machine)
        return person.first_s

    def test_a_job_whose_prefix_a_person_waits_for_is_read_as_theirs(self):
        """And so the person does not wait at the pace that jobs have beside people."""
        assert self.first_s(Priority.BACKGROUND) == pytest.approx(self.first_s(Priority.INTERACTIVE), rel=0.1)

    def test_a_cache_keeps_what_was_used_last(self):
        """A beginning outlives what follows it."""
        cache = PrefixCache(250)
        cache.used([1, 2], [100, 100])
        cache.used([1, 3], [100, 100])
        assert cache.held([1, 3]) == 2
        assert cache.held([1, 2]) == 1
        assert cache.num_tokens == 200


def test_arrivals_lengths_and_turns_are_those_of_the_shape():
    """So many requests a second, so many turns, so many jobs."""
    turns, jobs, now = 0, 0, 0.0
    for arrival in islice(Trace(SHAPE, 10.0, 1), 4000):
        now, talk = arrival
        turns += talk.turns_left
        jobs += talk.priority is Priority.BACKGROUND
    assert turns / now == pytest.approx(10.0, rel=0.1)
    assert jobs / turns == pytest.approx(SHAPE.job_share, rel=0.1)


def answered(talk, turn, first_s, **fields):
    """A request of a person, with a prompt of 100 tokens, as a client saw it."""
    asked = {"talk": talk, "turn": turn, "answer_id": f"{talk}.{turn}", "first_s": first_s}
    return Answered(**asked, **{"is_persons": True, "num_prompt": 100, "num_cached": 0, **fields})


def test_figures_of_servers_are_those_of_the_simulator():
    """Hits by tokens, first tokens of people alone, turns of one conversation that another machine had."""
    answers = [
        answered(1, 1, 0.5, num_cached=60),
        answered(2, 0, 9.0, is_persons=False),
        answered(1, 0, 2.0),
        answered(1, 2, 0.7, num_cached=80),
    ]
    found = measured_figures(answers, {"1.0": "a", "1.1": "a", "1.2": "b", "2.0": "a"})
    assert found["hit_rate"] == pytest.approx(140 / 400)
    assert (found["first_token_p50_s"], found["first_token_p95_s"]) == (0.7, 2.0)
    assert found["job_first_token_p95_s"] == 9.0
    assert found["turns_moved"] == 1 / 2
    assert found["served_most_over_mean"] == 3 * 3 / 4


def test_a_trace_for_servers_has_whole_conversations_and_the_tokens_of_their_template():
    """The same each time, whoever plays it."""
    shape = replace(SHAPE, scale=0.25, min_system=220, mean_turns=4.0)
    plan = replace(SMALL, requests=50, shape=shape, warm_up=0.0)
    first = list(arrivals(plan))
    again = [Frame(7, 5).around(arrival) for arrival in arrivals(plan)]
    num_turns = sum(arrival.conversation.turns_left for arrival in first)
    assert num_turns >= 50
    for plain, framed in zip(first, again, strict=True):
        one, other = plain.conversation, framed.conversation
        assert (plain.at_s, one.chain, one.turns_left) == (framed.at_s, other.chain, other.turns_left)
        assert sum(other.tokens) - sum(one.tokens) == 7 + 5 * len(one.tokens)
        assert [turn.own for turn in other.coming] == [turn.own + 10 for turn in one.coming]
        assert len(one.tokens) == 1 or one.tokens[0] >= 220
    found = Fleet(replace(plan, requests=num_turns), Routed(), again).play()
    assert found["requests"] == num_turns


def test_costs_are_read_from_a_file_and_a_wrong_one_is_named(tmp_path, capsys):
    """As --measure prints them."""
    path = tmp_path / "costs.json"
    path.write_text('{"steps": [[1, 0.01], [512, 1.0]], "slots": 3}')
    assert read(str(path)).slots == 3
    path.write_text('{"steps": 4}')
    assert main(["--costs", str(path), "--machines", "2", "--requests", "10"]) == 1
    assert "no file of costs" in capsys.readouterr().err


def test_costs_in_company_are_fitted_to_what_steps_took():
    """So much a step and a token, whatever a report has of each; reports that are all alike are refused."""
    sizes = ((4, 4), (10, 20), (2, 700), (1, 512), (0, 0))
    told = [Steps(num, 0.01 * num + 0.002 * num_tokens, num_tokens) for num, num_tokens in sizes]
    costs = fitted(told, Costs(steps=((1, 9.0),), slots=4))
    assert [num for num, _ in costs.steps] == [1, 4, 512]
    assert [took_s for _, took_s in costs.steps] == pytest.approx([0.012, 0.018, 1.034])
    with pytest.raises(BenchError, match="1 reports"):
        fitted(told[:1], costs)


def test_the_command_prints_a_row_a_policy(capsys):
    """As a table, for the page."""
    options = ["--machines", "3", "--requests", "60", "--policy", "stoker", "--policy", "session"]
    assert main(options) == 0
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]] == [
        "`stoker`",
        "`session`",
    ]
