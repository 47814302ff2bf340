"""Pictures in the engine: each encoded once, in slices, and in nobody's way."""

from itertools import pairwise

import pytest

from memory_stand_in import GREEDY
from stoker.backends.fake.vision import NUM_TOKENS
from stoker.ipc.commands import Cancel, Pause, Resume, Submit
from stoker.ipc.events import Delta, Failed, Finished
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Picture, Priority, Sampling
from stoker.scheduler.slice_budget import PLAIN_STEPS

ORDER = "eog_period=0,vision=5,weights_mib=100"
RED = Picture(width=2, height=2, rgb=bytes([200, 0, 0] * 4))
BLUE = Picture(width=2, height=2, rgb=bytes([0, 0, 200] * 4))
BLACK = Picture(width=2, height=2, rgb=bytes(12))
ASKED = f"{IMAGE_MARKER} what is it?"


def seeing(make, **spec):
    """A machine with a model that sees."""
    machine = make()
    machine.know("a", ORDER, **spec)
    return machine


def look(machine, name, pictures=(RED,), prompt=ASKED, **fields):
    """Ask about pictures."""
    machine.submit(name, "a", prompt=prompt, pictures=tuple(pictures), **fields)


def alone(make, pictures=(RED,), prompt=ASKED, **fields):
    """What the request gets on a machine of its own."""
    machine = seeing(make)
    look(machine, "alone", pictures, prompt, **fields)
    machine.run("alone")
    assert machine.of(Failed) == []
    return machine.output("alone")


def num_slices(machine):
    """Slices of pictures computed since the model was loaded."""
    runner = machine.runner("a")
    return 0 if runner is None else runner.backend.vision.num_slices_run


def num_encoded(machine):
    """Pictures encoded since the model was loaded."""
    return machine.runner("a").stats()["images_encoded_total"]


def test_an_answer_depends_on_what_the_picture_shows(make):
    """SPEC V2: other picture, other answer; the same one, the same."""
    red, blue, again = alone(make, [RED]), alone(make, [BLUE]), alone(make, [RED])
    assert red == again
    assert red.tokens != blue.tokens


def test_pictures_are_seen_in_their_places(make):
    """SPEC V2: three pictures in one prompt, in each order, differ from one another."""
    prompt = f"first {IMAGE_MARKER} then {IMAGE_MARKER} last {IMAGE_MARKER}?"
    green = Picture(width=2, height=2, rgb=bytes([0, 200, 0] * 4))
    orders = [(RED, BLUE, green), (BLUE, RED, green), (green, BLUE, RED)]
    tokens = [tuple(alone(make, order, prompt).tokens[0]) for order in orders]
    assert len(set(tokens)) == 3


def test_tokens_of_a_picture_count_as_tokens_of_the_prompt(make):
    """SPEC V3: embeddings, and the brackets that the projector puts around them."""
    machine = seeing(make)
    look(machine, "r")
    machine.run("r")
    (finished,) = machine.of(Finished, "r")
    text = len(" what is it?")
    assert finished.usage.prompt_tokens >= NUM_TOKENS + 2 + text


def test_the_same_picture_is_encoded_once_for_all_who_ask_about_it(make):
    """SPEC C11: at the same time, in a later turn, and in other words."""
    machine = seeing(make)
    for name in ("r0", "r1", "r2"):
        look(machine, name, prompt=f"{name} {IMAGE_MARKER}?")
    machine.run("r0", "r1", "r2")
    look(machine, "later", prompt=f"quite another beginning {IMAGE_MARKER} and end")
    machine.run("later")
    assert num_encoded(machine) == 1
    assert machine.of(Failed) == []


def test_a_later_turn_about_the_same_picture_computes_its_tokens_no_more(make):
    """SPEC C11: cells and states are found by what the picture shows."""
    machine = seeing(make)
    look(machine, "r")
    machine.run("r")
    look(machine, "again", prompt=ASKED + " really")
    machine.run("again")
    (finished,) = machine.of(Finished, "again")
    assert finished.usage.cached_tokens >= NUM_TOKENS
    look(machine, "other", [BLUE], prompt=ASKED + " really")
    machine.run("other")
    (finished,) = machine.of(Finished, "other")
    assert finished.usage.cached_tokens < NUM_TOKENS
    assert num_encoded(machine) == 2


def test_who_shares_nothing_has_the_picture_encoded_alone(make):
    """SPEC C1, C10: another salt, or no cache at all; and nothing of it is kept."""
    machine = seeing(make)
    for number, fields in enumerate([{}, {"cache_salt": "a"}, {"cache": False}, {"cache": False}, {}]):
        look(machine, f"r{number}", **fields)
        machine.run(f"r{number}")
    assert num_encoded(machine) == 4
    assert all(machine.output(f"r{number}") == machine.output("r0") for number in range(5))


def test_others_go_on_decoding_while_a_picture_is_encoded(make):
    """SPEC V3: a slice at a time, and a step in between."""
    machine = make()
    machine.know("a", "eog_period=0,vision=400,weights_mib=100")
    machine.submit("talk", "a", max_tokens=2000)
    machine.until_tokens("talk", 3)
    look(machine, "r")
    machine.until(lambda: num_slices(machine) >= 20)
    before = len(machine.tokens("talk"))
    machine.until(lambda: num_slices(machine) >= 40)
    assert len(machine.tokens("talk")) - before >= 20
    machine.run("r")
    assert machine.output("r") == alone(make)


@pytest.mark.usefixtures("still_clock")
def test_readers_of_short_steps_see_few_tokens_come_later(make):
    """SPEC V3, Q8: slices and the tokens of pictures come in bursts, one in forty steps."""
    machine = make()
    machine.know("a", "eog_period=0,vision=4,weights_mib=100")
    machine.submit("talk", "a", max_tokens=1500)
    machine.until_tokens("talk", 3)
    look(machine, "r", [RED, BLUE], prompt=ASKED + IMAGE_MARKER)
    late, slices = [], 0
    while not machine.has_ended("r"):
        if num_slices(machine) > slices:
            late.append(len(machine.tokens("talk")))
        slices = num_slices(machine)
        machine.turn()
    assert len(late) == 8
    assert min(b - a for a, b in pairwise(late)) >= PLAIN_STEPS


@pytest.mark.usefixtures("still_clock")
def test_words_about_a_picture_that_is_computed_wait_for_no_burst(make):
    """SPEC C11, Q8: beside somebody who reads, a further question about it is text as any other."""
    machine = make()
    machine.know("a", "eog_period=0,vision=4,weights_mib=100", num_slots=4)
    look(machine, "first")
    machine.run("first")
    machine.submit("talk", "a", max_tokens=1500)
    machine.until_tokens("talk", 3)
    look(machine, "before", [BLUE])  # the first burst is taken
    machine.until(lambda: num_slices(machine) > 4)
    look(machine, "again", prompt=ASKED + " and again?")
    before = len(machine.tokens("talk"))
    machine.until_tokens("again", 1)
    assert len(machine.tokens("talk")) - before < PLAIN_STEPS // 2


def test_a_slice_is_no_part_of_a_step(make):
    """SPEC V3: the answer of who talks meanwhile is what it would have been."""
    machine = seeing(make)
    machine.submit("talk", "a", max_tokens=60)
    machine.until_tokens("talk", 3)
    look(machine, "r")
    machine.run("talk", "r")
    assert machine.output("talk") == make.alone(max_tokens=60)


def test_people_have_their_pictures_encoded_before_jobs(make):
    """SPEC Q1, V3: whose is being encoded stays; the next one is an interactive one's."""
    machine = make()
    machine.know("a", "eog_period=0,vision=50,weights_mib=100", num_slots=4)
    for number in range(3):
        picture = Picture(width=1, height=1, rgb=bytes([number + 1, 9, 9]))
        look(machine, f"job{number}", [picture], priority=Priority.BACKGROUND)
    machine.until(lambda: num_slices(machine) >= 5)
    look(machine, "person", [RED])
    machine.until(lambda: machine.has_ended("person"))
    assert not any(machine.has_ended(f"job{number}") for number in (1, 2))
    machine.run("job0", "job1", "job2")
    assert num_encoded(machine) == 4


@pytest.mark.usefixtures("still_clock")
def test_jobs_take_no_steps_while_a_person_waits_for_a_picture(make):
    """SPEC Q3, V3: its picture is encoded at once; where a person decodes, jobs may go on beside."""
    machine = make()
    machine.know("a", "eog_period=0,vision=30,weights_mib=100", num_slots=3)
    machine.submit("job", "a", priority=Priority.BACKGROUND, max_tokens=900)
    machine.until_tokens("job", 3)
    look(machine, "person")
    machine.until(lambda: num_slices(machine) >= 5)
    before = len(machine.tokens("job"))
    machine.until(lambda: num_slices(machine) >= 25)
    assert len(machine.tokens("job")) <= before + 1
    machine.run("person")
    machine.submit("talk", "a", max_tokens=600)
    machine.until_tokens("talk", 3)
    look(machine, "another", [BLUE])
    machine.until(lambda: num_slices(machine) >= 32)
    before = len(machine.tokens("job"))
    machine.until(lambda: num_slices(machine) >= 35)
    assert len(machine.tokens("job")) > before + 10


def test_a_request_cancelled_while_its_picture_is_encoded_stops_that(make):
    """SPEC Q6, M8: the projector is free for the next one."""
    machine = make()
    machine.know("a", "eog_period=0,vision=1000,weights_mib=100")
    look(machine, "r")
    machine.until(lambda: num_slices(machine) >= 5)
    machine.send(Cancel("r"))
    look(machine, "next", [BLUE])
    machine.until(lambda: num_slices(machine) >= 20)
    assert num_encoded(machine) == 0
    machine.run("r", "next")
    assert num_encoded(machine) == 1
    assert machine.output("next") == alone(make, [BLUE])


def test_a_paused_request_has_its_picture_wait(make):
    """SPEC Q17: nothing is encoded for it until it is resumed, and then the rest of it."""
    machine = make()
    machine.know("a", "eog_period=0,vision=50,weights_mib=100")
    look(machine, "r")
    machine.until(lambda: num_slices(machine) >= 5)
    machine.send(Pause("r"))
    for _ in range(20):
        machine.turn()
    assert num_slices(machine) < 10
    machine.send(Resume("r"))
    machine.run("r")
    assert num_slices(machine) == 50
    assert machine.output("r") == alone(make)


def test_a_picture_that_cannot_be_encoded_fails_those_who_asked_about_it_alone(make):
    """SPEC Q12: a typed error; others do not notice."""
    machine = seeing(make)
    look(machine, "bad", [BLACK])
    look(machine, "good", [RED])
    machine.run("bad", "good")
    assert [failed.request_id for failed in machine.of(Failed)] == ["bad"]
    assert machine.output("good") == alone(make)


@pytest.mark.parametrize("when", ["encoding", "prefill", "decode"])
def test_a_model_that_goes_meanwhile_costs_no_answer(make, when):
    """SPEC M4, L2, Q4: parked as tokens and pictures, wherever it was."""
    machine = make()
    machine.know("a", "eog_period=0,vision=40,weights_mib=100", n_batch=32)
    fields = {"prompt": ASKED + " x" * 200, "max_tokens": 40, "sampling": Sampling(seed=7)}
    look(machine, "r", **fields)
    if when == "encoding":
        machine.until(lambda: num_slices(machine) >= 5)
    elif when == "prefill":
        machine.until(lambda: machine.runner("a") and machine.runner("a").scheduler.cells.used > NUM_TOKENS)
    else:
        machine.until_tokens("r", 10)
    now = machine.loop._clock.now()
    machine.residency._unload(machine.residency._catalogue.get("a"), "tested", now)
    machine.run("r")
    assert machine.output("r") == alone(make, **fields)
    assert len(machine.of((Finished, Failed), "r")) == 1


def test_a_job_parked_for_a_person_goes_on_with_its_picture(make):
    """SPEC Q3, Q4: preempted while its picture is encoded, in its prefill and while it decodes."""
    machine = make()
    machine.know("a", "eog_period=0,vision=30,weights_mib=100", num_slots=1, n_batch=16)
    look(machine, "job", priority=Priority.BACKGROUND, max_tokens=30)
    for number in range(12):
        for _ in range(6):
            machine.turn()
        machine.submit(f"p{number}", "a", prompt=f"person {number}", max_tokens=3)
        machine.run(f"p{number}")
    machine.run("job")
    assert machine.output("job") == alone(make, max_tokens=30)


def test_several_choices_share_the_picture(make):
    """SPEC Q16: n completions, one encode."""
    machine = seeing(make)
    look(machine, "r", n=3, sampling=Sampling(seed=5), max_tokens=20)
    machine.run("r")
    assert num_encoded(machine) == 1
    output = machine.output("r")
    assert len({tuple(tokens) for tokens in output.tokens.values()}) == 3
    assert output == alone(make, n=3, sampling=Sampling(seed=5), max_tokens=20)


def test_a_replayed_request_goes_on_from_its_tokens(make):
    """SPEC L3: the front sends picture and tokens again; the draw is what it would have been."""
    whole = alone(make, max_tokens=30, sampling=Sampling(seed=3)).tokens[0]
    machine = seeing(make)
    request = GenerateRequest(
        prompt=ASKED, model="a", pictures=(RED,), max_tokens=30, sampling=Sampling(seed=3)
    )
    machine.send(Submit(request_id="r", request=request, generated=[whole[:11]]))
    machine.run("r")
    assert [t for delta in machine.of(Delta, "r") for t in delta.token_ids] == whole[11:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "no place for it"}, "messages"),
        ({"prompt": ASKED + IMAGE_MARKER}, "messages"),
        ({"prompt": (1, 2, 3)}, "prompt"),
        ({"echo": True}, "echo"),
        ({"context_shift": True}, "context_shift"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_go_with_pictures_is_refused(make, fields, param):
    """SPEC V2: a typed 400 that names the field."""
    machine = seeing(make)
    look(machine, "r", **fields)
    machine.run("r")
    (failed,) = machine.of(Failed, "r")
    assert (failed.error.http_status, failed.error.param) == (400, param)


@pytest.mark.parametrize(("fields", "param"), [({}, "prompt"), ({"is_chat": True}, "messages")])
def test_a_marker_without_a_picture_is_refused(make, fields, param):
    """SPEC V2: also where no pictures can be given, so that none is left out unnoticed."""
    machine = seeing(make)
    look(machine, "r", [], **fields)
    machine.run("r")
    (failed,) = machine.of(Failed, "r")
    assert (failed.error.http_status, failed.error.param) == (400, param)


def test_a_model_without_a_projector_refuses_pictures(make):
    """SPEC V5: and says what it lacks."""
    machine = make()
    machine.know("a")
    machine.submit("r", "a", prompt=ASKED, pictures=(RED,))
    machine.run("r")
    (failed,) = machine.of(Failed, "r")
    assert failed.error.http_status == 400
    assert "projector" in failed.error.message


def test_a_model_that_sees_answers_text_alone(make):
    """SPEC V5: as one that does not."""
    machine = seeing(make)
    machine.submit("r", "a", sampling=GREEDY)
    machine.run("r")
    assert machine.output("r") == make.alone()
