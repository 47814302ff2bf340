"""Frames of `stoker top` from given documents, and what events change in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from top_documents import AT, lane, moved, row, snapshot

from stoker.cli.top.frame import ALL_LINES, FrameState, frame, selectable
from stoker.cli.top.keys import MAX_PENDING, Key, KeyReader
from stoker.cli.top.layout import ASCII, shares
from stoker.cli.top.view import MAX_RECENT, MAX_ROWS, RuntimeView

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "top"
FOOTER = "q quit  ↑↓ select  p pause  r resume  c cancel"


def view_of(*documents: dict) -> RuntimeView:
    """What a snapshot and further documents add up to."""
    view = RuntimeView()
    for document in (snapshot(), *documents):
        view.take(document)
    return view


def shown(view: RuntimeView, width: int = 80, height: int = ALL_LINES, **fields) -> list[str]:
    """The lines of a frame, without styles."""
    state = FrameState(width=width, height=height, now=AT + 2.0, footer=FOOTER, **fields)
    return [line.plain.rstrip() for line in frame(view, state)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40)])
def test_a_frame_is_what_it_was(width: int, height: int) -> None:
    """O16: slots, the line with class, place, ETA and reason, ends, models, memory, cache and speed."""
    lines = shown(view_of(), width, height, selected="req-4")
    golden = GOLDEN / f"{width}x{height}.txt"
    assert "\n".join(lines) + "\n" == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 40, 80, 81, 132, 250])
@pytest.mark.parametrize("height", [1, 3, 6, 12, 24, 60])
def test_a_frame_never_exceeds_the_screen(width: int, height: int) -> None:
    """O16: whatever the size; the line of keys is the last where there is room for it."""
    many = [row(f"req-{number}-ü世界", "queued", position=number) for number in range(100)]
    lines = shown(view_of(snapshot(requests=many)), width, height, selected="req-70-ü世界")
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    if height > 6:
        assert lines[-1].startswith(FOOTER[:16])


def test_a_small_screen_shows_the_selected_row_and_counts_the_others() -> None:
    """O16: a long line scrolls with the selection."""
    many = [row(f"req-{number}", "queued", position=number) for number in range(50)]
    lines = shown(view_of(snapshot(requests=many, slots=[], groups=[])), 80, 24, selected="req-40")
    assert any("req-40" in line for line in lines[:-2])
    assert any("more" in line for line in lines)


def test_a_preemption_moves_one_request_out_of_its_slot_and_another_in() -> None:
    """O16: the slot, the line and the reason follow the moves."""
    view = view_of(
        moved("req-1", "parked", "parked", reason="gave its slot to req-3 (interactive)", by="req-3"),
        moved("req-3", "admitted", "prefill", slot=0),
    )
    assert view.lanes["chat", 0] == lane(0, "req-3", "prefill")
    waiting = {one["request_id"]: one for one in view.waiting}
    assert waiting["req-1"]["waits_for"] == "gave its slot to req-3 (interactive)"
    assert "req-3" not in waiting
    assert any("gave its slot to req-3" in line for line in shown(view, 140))


def test_an_end_frees_the_slot_and_stands_among_the_last() -> None:
    """O16: with how it ended and what it took."""
    ended = row("req-1", "ended", finish_reason="length", completion_tokens=256, end_to_end_s=9.0)
    view = view_of(moved("req-1", "finished", "ended") | ended)
    assert view.lanes["chat", 0]["request_id"] is None
    assert "req-1" not in view.requests
    assert view.recent[-1]["finish_reason"] == "length"
    assert any("length" in line and "req-1" in line for line in shown(view))


def test_progress_changes_figures_and_not_the_place() -> None:
    """O16: of a prompt and of an answer; other fields stay."""
    view = view_of(
        {"event": "request", "at": AT, "request_id": "req-2", "what": "prefill_progress", "processed": 3000},
        {"event": "request", "at": AT, "request_id": "req-1", "what": "progress", "completion_tokens": 120},
    )
    assert view.requests["req-2"]["processed_tokens"] == 3000
    assert any("120/256" in line for line in shown(view))
    assert view.lanes == view_of().lanes


def test_a_call_of_several_requests_is_one_row() -> None:
    """O16: its members have slots, and their row is the call's."""
    member = row("embed-7-x-0", "prefill", kind="embed", group="embed-7", priority="background")
    view = view_of(snapshot(requests=[member], slots=[lane(0, "embed-7-x-0", "prefill")]))
    assert view.waiting == []
    assert selectable(view, AT) == ["embed-7"]


def test_a_snapshot_replaces_everything_and_unknown_events_change_nothing() -> None:
    """O16: as after a reader was too slow."""
    view = view_of({"event": "aurora", "at": AT}, moved("req-9", "admitted", "prefill", slot=2, model="chat"))
    assert view.lanes["chat", 2]["request_id"] == "req-9"
    view.take(snapshot())
    assert shown(view) == shown(view_of())


def test_what_a_view_keeps_is_bounded() -> None:
    """O16: live requests beyond the bound are counted."""
    view = RuntimeView()
    view.take(
        snapshot(requests=[row(f"req-{number}", "queued") for number in range(MAX_ROWS + 5)], groups=[])
    )
    assert (len(view.requests), view.num_hidden) == (MAX_ROWS, 5)
    assert any("5 more" in line for line in shown(view))
    for number in range(MAX_RECENT + 5):
        view.take(moved(f"req-{number}", "finished", "ended") | row(f"req-{number}", "ended"))
    assert len(view.recent) == MAX_RECENT


def test_models_engine_and_pressure_follow_their_events() -> None:
    """O16: a model that goes takes its slots with it; an engine that restarts is said to."""
    view = view_of(
        {"event": "model", "at": AT, "model": "chat", "state": "absent"},
        {"event": "model", "at": AT, "model": "other", "state": "ready", "num_slots": 2},
        {"event": "engine", "at": AT + 1.0, "state": "restarting", "reason": "it was killed"},
        {"event": "pressure", "at": AT, "level": "critical", "fraction": 0.9, "source": "psi"},
        {"event": "rung", "at": AT, "rung": "drop_snapshots", "is_undone": False},
    )
    assert sorted(view.lanes) == [("other", 0), ("other", 1)]
    head = "\n".join(shown(view, 200))
    assert "restarting for 1.0 s · it was killed" in head
    assert "pressure critical 90% (psi)" in head
    assert "gives up trim_allocator, drop_snapshots" in head


def test_how_long_a_model_stays_passes_and_pins_and_uses_follow_their_events() -> None:
    """O16: from when it was told; what others do to a model is seen without a new snapshot."""

    def stays(**fields) -> str:
        event = {"event": "model", "what": "changed", "at": AT, "model": "chat", "state": "ready", **fields}
        lines = shown(view_of({"num_slots": 1, "is_pinned": False, "leases": 0, **event}))
        return " ".join(next(line for line in lines if line.startswith("chat  ") and "ready" in line).split())

    assert stays(unload_in_s=60.0).endswith("ready 103 MiB for 58 s")
    assert stays(unload_in_s=1.0).endswith("ready 103 MiB for 0.00 s")
    assert stays(is_pinned=True).endswith("ready 103 MiB pinned")
    assert stays(leases=3).endswith("ready 103 MiB 3")


def test_busy_slots_stay_where_idle_ones_have_no_room() -> None:
    """O16: as on a server of many slots and a small screen."""
    lanes = [lane(slot) for slot in range(12)] + [lane(12, "req-1", "decode")]
    lines = shown(view_of(snapshot(slots=lanes, requests=[row("req-1", "decode")])), 80, 24)
    slots = lines[lines.index(next(line for line in lines if line.startswith("SLOTS"))) + 1 :]
    assert "req-1" in slots[0]
    assert slots[1].endswith("idle")
    whole = shown(view_of(snapshot(slots=lanes, requests=[row("req-1", "decode")])), 80)
    assert [line.split()[1] for line in whole if line.startswith("chat") and "ready" not in line] == [
        str(slot) for slot in range(13)
    ]


def test_a_narrow_screen_says_who_it_is_what_it_does_and_why_it_waits() -> None:
    """O16: 40 columns; class, times and tokens of prompts are left out first."""
    waiting = row("req-77", "queued", position=0, waits_for="no free slot")
    lines = shown(view_of(snapshot(requests=[waiting], groups=[])), 40, 15)
    (line,) = [line for line in lines if "req-77" in line]
    assert line.split()[:4] == ["0", "queued", "req-77", "no"]


def test_what_is_said_twice_or_of_nothing_is_left_out() -> None:
    """O16: a reason that is the state, one of one request, a load among requests that ended."""
    view = view_of(
        {"event": "engine", "at": AT, "state": "suspended", "reason": "suspended"},
        moved("load:chat", "arrived", "loading") | {"kind": "load"},
        moved("load:chat", "finished", "ended") | {"kind": "load"},
        moved("one", "arrived", "queued") | {"num_members": 1, "num_done": 0},
    )
    text = "\n".join(shown(view, 200))
    assert "suspended for 2.0 s" in text
    assert "suspended · " not in text.replace("suspended for", "")
    assert "load:chat" not in text
    assert "0/1" not in text


def test_names_command_no_terminal() -> None:
    """O16: a name from outside may hold escapes."""
    lines = shown(view_of(snapshot(requests=[row("req-\x1b[2J", "queued")], groups=[])))
    assert "\x1b" not in "".join(lines)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    """O16: bars and dots; what the server says stays."""
    lines = shown(view_of(snapshot(engine={"state": "serving"})), glyphs=ASCII)
    assert "".join(lines[:-1]).isascii() or "°" in "".join(lines)
    assert "####" in lines[1]


def test_lines_are_shared_by_weight_and_given_to_those_who_want_them() -> None:
    """O16: what one part does not need others get."""
    assert shares([(2, 4), (50, 4), (50, 2)], 20) == [2, 12, 6]
    assert shares([(2, 1), (3, 1)], 20) == [2, 3]


def test_keys_come_in_pieces_and_unknown_ones_mean_nothing() -> None:
    """O16: arrows of either mode, letters, Ctrl-C."""
    reader = KeyReader()
    assert reader.read(b"\x1b") == []
    assert reader.read(b"[A") == [Key.UP]
    assert reader.read(b"\x1bOBq") == [Key.DOWN, Key.QUIT]
    assert reader.read(b"\x1b[1;5Cx\x03") == [Key.OTHER, Key.OTHER, Key.QUIT]
    assert reader.read(b"\x1b[" + b"1" * MAX_PENDING) == []
    assert reader.read(b"p") == [Key.PAUSE]


def test_long_ids_are_cut_where_people_compare_them() -> None:
    """O16: in the line and in reasons; where there is room an id is whole, to be copied."""
    long_id = "chatcmpl-20f11d6739d44501a49062ccbb2bb5f7"
    view = view_of(
        snapshot(requests=[row(long_id, "parked", waits_for=f"gave its slot to {long_id}")], groups=[])
    )
    assert any("chatcmpl-20f11d " in line and "to chatcmpl-20f11d" in line for line in shown(view, 120))


def test_a_slot_in_between_goes_with_its_request() -> None:
    """O16: a job that is owed a step has a place beyond the model's slots for it."""
    view = view_of(moved("req-5", "admitted", "prefill", slot=3))
    assert view.lanes["chat", 3]["request_id"] == "req-5"
    view.take(moved("req-5", "parked", "parked", reason="gave its slot to req-1"))
    assert ("chat", 3) not in view.lanes


def test_a_choice_that_ends_leaves_the_others_as_they_are() -> None:
    """O16: the request ends with its last choice."""
    view = view_of(moved("req-3", "choice_ended", "ended", index=1))
    assert view.requests["req-3"]["state"] == "queued"
