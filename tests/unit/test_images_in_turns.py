"""Pictures in a conversation: where each stands, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import threading

import msgspec
import pytest

from encoding_runtime import ENCODER_INFO
from pictures import plain, uri
from planning import planned_chat
from stoker.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stoker.images import Image, decode
from stoker.images.intake import Intake
from stoker.images.limits import ImageLimits
from stoker.images.turns import Given, illustrated, with_images
from stoker.ipc.request import IMAGE_MARKER as HERE

BLIND = msgspec.structs.replace(ENCODER_INFO, id="reader", model_class="decoder")
SEEING = msgspec.structs.replace(BLIND, has_vision=True)


def link(name: str):
    """A picture's part."""
    return {"type": "image_url", "image_url": {"url": name}}


def text(words: str):
    """A text's part."""
    return {"type": "text", "text": words}


def user(*parts):
    """A user's turn."""
    return {"role": "user", "content": list(parts)}


def seen(*turns, info=SEEING):
    """Contents and pictures of a conversation."""
    messages, images = illustrated(turns, info)
    return [turn["content"] for turn in messages], [one.source for one in images]


def test_a_picture_stands_where_its_part_stands():
    """SPEC V2: three pictures in each order, with texts around them."""
    for names in itertools.permutations("abc"):
        parts = [text("1"), link(names[0]), text("2"), link(names[1]), link(names[2]), text("3")]
        assert seen(user(*parts)) == ([f"1{HERE}2{HERE}{HERE}3"], list(names))


def test_markers_in_the_text_take_the_pictures_in_their_order():
    """SPEC V2: they stand for the pictures of their own turn."""
    asked = user(link("a"), text(f"first {HERE}, then {HERE}."), link("b"))
    assert seen(asked) == ([f"first {HERE}, then {HERE}."], ["a", "b"])


def test_pictures_without_a_marker_stand_at_the_front():
    """SPEC V2: markers are added when there are fewer than pictures."""
    asked = user(text(f"this: {HERE}"), link("a"), link("b"), link("c"))
    assert seen(asked) == ([f"{HERE}{HERE}this: {HERE}"], ["a", "b", "c"])


def test_pictures_of_several_turns_come_in_order():
    """SPEC V2: a conversation goes on about its pictures; a tool may show some."""
    turns = [
        user(link("a"), text("?")),
        {"role": "assistant", "content": "!"},
        {"role": "tool", "content": [link("b")], "tool_call_id": "1"},
        user(text("and "), {"type": "input_image", "image_url": "c"}),
    ]
    assert seen(*turns) == ([f"{HERE}?", "!", HERE, f"and {HERE}"], ["a", "b", "c"])


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([user(text(HERE))], "messages.0.content"),
        ([{"role": "user", "content": f"{HERE}{HERE}"}], "messages.0.content"),
        ([user(link("a"), text(f"{HERE} {HERE}"))], "messages.0.content"),
        ([user(link("a")), {"role": "user", "content": HERE}], "messages.1.content"),
        ([{"role": "system", "content": [link("a")]}], "messages.0.content.0.image_url"),
        ([{"role": "assistant", "content": [text("x"), link("a")]}], "messages.0.content.1.image_url"),
        ([{"role": "system", "content": HERE}, user(link("a"))], "messages.0.content"),
        ([user({"type": "image_url"})], "messages.0.content.0.image_url"),
        ([user({"type": "image_url", "image_url": {"url": 7}})], "messages.0.content.0.image_url"),
        ([user(link("a"), {"type": "audio"})], "messages.0.content.1"),
        ([user(7)], "messages.0.content.0"),
    ],
)
def test_a_marker_too_many_or_in_the_wrong_place_is_refused(turns, param):
    """SPEC V2: 400 naming the place."""
    with pytest.raises(InvalidRequestError) as caught:
        illustrated(turns, SEEING)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("pairing", "said"),
    [("", "has no vision"), ("needs_projector", "--mmproj"), ("broken", "does not fit")],
)
def test_a_model_that_cannot_see_says_what_it_lacks(pairing, said):
    """SPEC V1, V5: 400 that names the model."""
    info = msgspec.structs.replace(BLIND, pairing=pairing)
    with pytest.raises(UnsupportedError, match=f"reader.*{said}") as caught:
        illustrated([user(text("?"), link("a"))], info)
    assert caught.value.param == "messages.0.content.1"
    assert seen({"role": "user", "content": f"the word {HERE}"}, info=info)[0] == [f"the word {HERE}"]


def test_a_model_whose_pairing_is_ready_sees():
    """SPEC V1: known before its first load."""
    info = msgspec.structs.replace(BLIND, pairing="ready")
    assert seen(user(link("a")), info=info) == ([HERE], ["a"])


def test_an_application_gives_images_and_texts_as_they_are():
    """SPEC V2: `Image`s in a list with strings, or beside the messages for the last user turn."""
    one, other = Image(b"1"), Image(b"2")
    assert seen(user(one, "what?"))[1] == [one]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert seen(*with_images(turns, [one, other])) == ([f"{HERE}{HERE}a", "b"], [one, other])
    found = with_images(turns, ["a.png", b"2"])  # a path is no text of the turn
    assert [image.source for image in seen(*found)[1]] == ["a.png", b"2"]
    assert seen(*with_images(turns, other))[1] == [other]
    with pytest.raises(InvalidRequestError):
        with_images([{"role": "system", "content": "a"}], [one])
    assert with_images(turns, []) is turns


def test_texts_of_a_turn_are_lines_of_their_own_and_pictures_stand_where_they_are():
    """As llama-server joins parts."""
    assert seen(user(text("What is"), text("the best book"))) == (["What is\nthe best book"], [])
    turn = user(text("a"), text("b"), link("1"), link("2"), text("c"), text("d"))
    assert seen(turn) == ([f"a\nb{HERE}{HERE}c\nd"], ["1", "2"])


def test_a_template_that_leaves_a_picture_out_is_found_out():
    """SPEC V2: as many places in the prompt as pictures, or 400."""
    only_last = "{{ messages[-1]['content'] }}"
    info = msgspec.structs.replace(SEEING, chat_template=only_last)
    plan = planned_chat(info, [user(text("x")), user(link("a"), text("?"))])
    assert (plan.prompt, plan.images) == (f"{HERE}?", (Given("a", "messages.1.content.0.image_url"),))
    with pytest.raises(InvalidRequestError, match="0 of 1 pictures"):
        planned_chat(info, [user(link("a")), user(text("?"))])


async def test_pictures_are_taken_in_their_order_and_no_more_than_allowed():
    """SPEC V2, V3: each shrunk to the edge; the bound on their number is named."""
    intake = Intake(ImageLimits(edge_px=20, max_images=3))
    sizes = [(40, 30), (20, 20), (90, 45)]
    given = [Given(uri(plain(*size)), f"image {i}") for i, size in enumerate(sizes)]
    taken = await intake.take(given)
    assert [(one.picture.width, one.picture.height) for one in taken] == [(20, 15), (20, 20), (20, 10)]
    assert [one.report.shrunk_to for one in taken] == [(20, 15), None, (20, 10)]
    with pytest.raises(InvalidRequestError, match="at most 3"):
        await intake.take([*given, given[0]])
    with pytest.raises(InvalidRequestError) as caught:
        await intake.take([given[0], Given("data:,x", "the second")])
    assert caught.value.param == "the second"
    intake.close()


async def test_who_waits_for_the_darkroom_when_it_closes_is_told_so(monkeypatch):
    """SPEC L6: its caller has cancelled nothing; whoever has is not kept."""
    begun, release = threading.Event(), threading.Event()
    real = decode.decoded

    def slow(*args):
        begun.set()
        release.wait()
        return real(*args)

    monkeypatch.setattr(decode, "decoded", slow)
    intake = Intake(ImageLimits(edge_px=20))
    asked = [asyncio.create_task(intake.take([Given(uri(plain()), "image")])) for _ in range(3)]
    await asyncio.to_thread(begun.wait)
    asked[2].cancel()
    await asyncio.wait([asked[2]])
    intake.close()
    release.set()
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert len(first) == 1
    assert isinstance(second, NotReadyError)
    assert isinstance(third, asyncio.CancelledError)
    with pytest.raises(NotReadyError):
        await intake.take([Given(uri(plain()), "image")])
