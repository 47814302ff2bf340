"""State files and the folder they are kept in."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InvalidRequestError, MachineSetupError, StateNotFoundError
from stoker.ipc.request import Priority
from stoker.ipc.usage import Tensor
from stoker.models.states import file as state_file
from stoker.models.states.file import MAX_HEADER_BYTES, check_state, dump_state, parse_state, read_header
from stoker.models.states.store import StateStore
from stoker.runtime import Runtime
from stoker.sync import Runtime as SyncRuntime
from stoker.tasks.states import StateEmbedding

LAYOUT = (("layers.0.shift", (2, 3)), ("layers.0.state", (4,)))
VALUES = [np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3), np.array([0, 1, 0.5, -8], np.float32)]
TENSORS = [
    Tensor(name, shape, values.tobytes()) for (name, shape), values in zip(LAYOUT, VALUES, strict=True)
]


def saved(**changes: np.ndarray | None) -> bytes:
    """The library's own file of the state, with tensors changed, added or (None) left out."""
    arrays = {name: values for (name, _), values in zip(LAYOUT, VALUES, strict=True)}
    given = arrays | {name.replace("_", "."): value for name, value in changes.items()}
    return safetensors.numpy.save({name: value for name, value in given.items() if value is not None})


def refused(data: bytes) -> InvalidRequestError:
    """What parsing raises."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_state(data, LAYOUT)
    assert caught.value.param == "state"
    return caught.value


def test_the_library_reads_what_is_written_and_the_other_way_round() -> None:
    """SPEC K5: the file is a safetensors file like any other, with metadata."""
    data = dump_state(TENSORS, {"model": "m"})
    found = safetensors.numpy.load(data)
    for (name, _), values in zip(LAYOUT, VALUES, strict=True):
        assert np.array_equal(found[name], values)
    assert parse_state(data, LAYOUT) == TENSORS
    assert parse_state(saved(), LAYOUT) == TENSORS
    header, begin = read_header(data)
    assert header["__metadata__"] == {"model": "m"}
    assert begin % 8 == 0


def test_halves_become_floats() -> None:
    """SPEC K5: float16 and bfloat16 states are taken."""
    half = {
        name.replace(".", "_"): values.astype(np.float16)
        for (name, _), values in zip(LAYOUT, VALUES, strict=True)
    }
    found = parse_state(saved(**half), LAYOUT)
    assert np.allclose(np.frombuffer(found[0].data, "<f4"), VALUES[0].ravel(), atol=1e-3)
    upper = [(values.view(np.uint32) >> 16).astype("<u2").tobytes() for values in VALUES]
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        for (name, shape), offsets in zip(LAYOUT, ((0, 12), (12, 20)), strict=True)
    }
    text = msgspec.json.encode(header)
    found = parse_state(struct.pack("<Q", len(text)) + text + b"".join(upper), LAYOUT)
    assert np.frombuffer(found[1].data, "<f4").tolist() == [0, 1, 0.5, -8]


def test_what_does_not_fit_the_model_is_refused_by_name() -> None:
    """SPEC K5: a missing, foreign, misshapen or non-finite tensor is the caller's error and says which."""
    assert "lacks the tensor 'layers.0.state'" in refused(saved(layers_0_state=None)).message
    assert "foreign tensor 'x'" in refused(saved(x=VALUES[0])).message
    assert "[3, 2], not [2, 3]" in refused(saved(layers_0_shift=VALUES[0].reshape(3, 2))).message
    assert "I32" in refused(saved(layers_0_state=np.arange(4, dtype=np.int32))).message
    for bad in (np.nan, np.inf):
        assert "not finite" in refused(saved(layers_0_state=np.array([0, 1, bad, 0], np.float32))).message


def test_damaged_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC K5: short, long, empty, huge of header, no JSON, deep JSON."""
    data = saved()
    deep = b"[" * 100_000
    for bad in (
        b"",
        data[:7],
        data[:-1],
        data + b"\0",
        struct.pack("<Q", 2**63) + data[8:],
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 9),
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", len(deep)) + deep,
        b"\x80\x04pickle",
    ):
        refused(bad)
    monkeypatch.setattr(state_file, "MAX_STATE_BYTES", len(data) - 1)
    assert str(len(data)) in refused(data).message


@given(st.binary(max_size=200), st.integers(0, 120))
def test_no_bytes_raise_anything_else(noise: bytes, at: int) -> None:
    """SPEC K5: whatever is overwritten, a state is taken or refused, never more."""
    data = saved()
    broken = data[:at] + noise + data[at + len(noise) :]
    try:
        found = parse_state(broken, LAYOUT)
    except InvalidRequestError:
        return
    assert [(tensor.name, tensor.shape) for tensor in found] == list(LAYOUT)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """An empty store."""
    return StateStore(tmp_path / "states")


def test_a_state_is_kept_and_given_back(store: StateStore, tmp_path: Path) -> None:
    """SPEC K5: also by another process later; the file is private and tells what it is."""
    kept = store.save(saved(), model="m", num_tokens=7, name="mine")
    again = StateStore(tmp_path / "states")
    assert again.get("mine") == kept
    assert again.list() == [kept]
    data = again.load("mine")
    assert len(data) == kept.size_bytes
    check_state(data)
    assert parse_state(data, LAYOUT) == TENSORS
    (path,) = (tmp_path / "states").rglob("*.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again.delete("mine")
    assert again.list() == []
    with pytest.raises(StateNotFoundError):
        store.get("mine")


def test_names_are_made_up_or_checked(store: StateStore) -> None:
    """SPEC K5: a name leads nowhere but into the folder, and is given once."""
    first, second = (store.save(saved(), model="m").id for _ in range(2))
    assert first != second
    for name in ("", ".", "..", "a/b", "../a", "a.b", "-a", "a" * 65, "ä", "a\n"):
        with pytest.raises(InvalidRequestError) as caught:
            store.save(saved(), model="m", name=name)
        assert caught.value.param == "name"
        with pytest.raises(StateNotFoundError):
            store.load(name)
    with pytest.raises(InvalidRequestError, match="already"):
        store.save(saved(), model="m", name=first)


def test_a_state_is_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    """SPEC K5: the second run of a script; the one that goes leaves its room to the one that comes."""
    store = StateStore(tmp_path, max_states=1)
    store.save(saved(), model="m", name="mine")
    assert store.save(saved(), model="m", name="mine", num_tokens=5, replace=True).num_tokens == 5
    assert store.get("mine").num_tokens == 5
    with pytest.raises(InvalidRequestError, match="say replace"):
        store.save(saved(), model="m", name="mine")


def test_an_owner_sees_no_state_of_another(store: StateStore) -> None:
    """SPEC C1, K5: names of two owners do not meet."""
    store.save(saved(), model="m", name="a", owner="one")
    store.save(saved(), model="m", name="a", num_tokens=5, owner="two")
    assert (store.get("a", "one").num_tokens, store.get("a", "two").num_tokens) == (0, 5)
    assert store.list() == []
    store.delete("a", "two")
    with pytest.raises(StateNotFoundError):
        store.load("a", "two")
    assert store.get("a", "one")


def test_the_folder_has_bounds(tmp_path: Path) -> None:
    """SPEC S4: one state too many, or one byte, is refused with the numbers, and deleting makes room."""
    size = StateStore(tmp_path / "a").save(saved(), model="m", name="x").size_bytes
    few = StateStore(tmp_path / "few", max_states=1)
    few.save(saved(), model="m", name="a")
    with pytest.raises(InvalidRequestError, match="at most 1"):
        few.save(saved(), model="m", name="b")
    few.delete("a")
    few.save(saved(), model="m", name="b")
    small = StateStore(tmp_path / "small", max_bytes=2 * size)
    small.save(saved(), model="m", name="a")
    small.save(saved(), model="m", name="b")
    with pytest.raises(InvalidRequestError, match=str(2 * size)):
        small.save(saved(), model="m", name="c")


def test_a_damaged_file_is_never_handed_out(store: StateStore, tmp_path: Path) -> None:
    """SPEC K5: a flipped bit, a cut or foreign file is an error, and the list goes on without it."""
    kept = [store.save(saved(), model="m", name=name) for name in ("whole", "flipped", "cut")]
    folder = next((tmp_path / "states").iterdir())
    flipped = bytearray((folder / "flipped.safetensors").read_bytes())
    flipped[-1] ^= 1
    (folder / "flipped.safetensors").write_bytes(flipped)
    whole = (folder / "cut.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:20])
    (folder / "foreign.safetensors").write_bytes(saved())
    for name in ("flipped", "cut", "foreign"):
        with pytest.raises(InvalidRequestError, match=r"damaged|no safetensors"):
            store.load(name)
    assert {state.id for state in store.list()} == {"whole", "flipped"}
    assert store.get("whole") == kept[0]


def test_a_link_is_no_state(store: StateStore, tmp_path: Path) -> None:
    """SPEC C9: what lies elsewhere is not read through the folder."""
    store.save(saved(), model="m", name="a")
    folder = next((tmp_path / "states").iterdir())
    (folder / "link.safetensors").symlink_to(folder / "a.safetensors")
    with pytest.raises(StateNotFoundError):
        store.load("link")


def test_a_failed_write_leaves_nothing(
    store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC C9: a full disk is the machine's error, with no half file."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineSetupError, match="No space"):
        store.save(saved(), model="m", name="a")
    assert [path for path in (tmp_path / "states").rglob("*") if path.is_file()] == []


def test_nothing_is_saved_that_is_no_state(store: StateStore, tmp_path: Path) -> None:
    """SPEC K5: uploads are checked before they reach the folder."""
    with pytest.raises(InvalidRequestError):
        store.save(saved()[:-1], model="m")
    assert not (tmp_path / "states").exists()


FAKE = "fake:recurrent=1,eog_period=0"
FIRST, REST = tuple(range(60, 80)), tuple(range(80, 100))


async def text(runtime: Runtime, prompt: tuple[int, ...], **fields: object) -> str:
    """A greedy continuation."""
    deltas = runtime.generate(prompt, max_tokens=12, temperature=0.0, **fields)
    return "".join([delta.text async for delta in deltas])


async def test_a_library_saves_and_begins_from_states(tmp_path: Path) -> None:
    """SPEC K5, I9: an id, a path or bytes mean the same state."""
    async with Runtime(
        FAKE, isolation="thread", slots=2, states_dir=tmp_path / "s", cache_dir=tmp_path
    ) as runtime:
        whole = await text(runtime, FIRST + REST)
        kept = await runtime.states.save(FIRST, name="a", priority=Priority.BACKGROUND)
        assert kept.num_tokens == len(FIRST)
        data = await runtime.states.content("a")
        path = tmp_path / "a.safetensors"
        path.write_bytes(data)
        for state in ("a", path, data):
            assert await text(runtime, REST, state=state) == whole
        assert await text(runtime, REST) != whole
        for bad in ("absent", tmp_path / "absent", tmp_path, b"x"):
            with pytest.raises(InvalidRequestError) as caught:
                await text(runtime, REST, state=bad)
            assert caught.value.param == "state"


async def test_a_call_of_many_prompts_reads_the_state_that_they_begin_from_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC K5: it may be megabytes."""
    async with Runtime(FAKE, isolation="thread", states_dir=tmp_path / "s", cache_dir=tmp_path) as runtime:
        await runtime.states.save(FIRST, name="a")
        alone = [await runtime.states.embed(prompt, state="a") for prompt in (REST, FIRST)]
        reads: list[str] = []
        load = StateStore.load

        def counted(store: StateStore, state_id: str, owner: str = "") -> bytes:
            reads.append(state_id)
            return load(store, state_id, owner)

        monkeypatch.setattr(StateStore, "load", counted)
        together = await runtime.states.embed_all([REST, FIRST], state="a")
        assert [found.data for found in together] == [found.data for found in alone]
        assert reads == ["a"]


async def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """SPEC K5: an id means a state of the model that it is asked for."""
    StateStore(tmp_path / "s").save(saved(), model="other", name="a")
    async with Runtime(FAKE, isolation="thread", states_dir=tmp_path / "s", cache_dir=tmp_path) as runtime:
        with pytest.raises(InvalidRequestError, match="one of other, not of fake"):
            await text(runtime, REST, state="a")


def test_scripts_have_states_too(tmp_path: Path) -> None:
    """SPEC K5, D8, I9: the synchronous runtime mirrors the names."""
    with SyncRuntime(FAKE, isolation="thread", states_dir=tmp_path / "s", cache_dir=tmp_path) as runtime:
        kept = runtime.states.save(FIRST, name="a")
        assert list(runtime.states.list()) == [runtime.states.get("a")] == [kept]
        assert runtime.states.put(runtime.states.content("a"), name="b").id == "b"
        runtime.states.delete("a")
        with pytest.raises(StateNotFoundError):
            runtime.states.get("a")
        found = runtime.states.embed(FIRST)
        assert isinstance(found, StateEmbedding)
        assert (found.shape, len(found.data)) == ((1, 2, 2), 16)
