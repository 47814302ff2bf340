"""Names of shared files say all that upkeep needs; machines that look choose the same files (SPEC C20)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.radix import key_of
from stoker.cache.shared.files import shown_url
from stoker.cache.shared.names import (
    AHEAD_S,
    UNFINISHED_S,
    Listed,
    StoredName,
    StoreLimits,
    id_of,
    name_of,
    place_of,
    superfluous,
)

NEW = NewPrefix(bytes(32), "f1e2", "", key_of(range(40)))
PLACE = place_of("f1e2", "")
NOW_S = 1_800_000_000.0
WIDE = StoreLimits(10**12, 10**9)


def file(age_s: float, number: int = 0, size_bytes: int = 100, has_bytes: int | None = None) -> Listed:
    """A file of that age, for one of several prefixes."""
    name = name_of(replace(NEW, tokens=key_of([number] * 40)), PLACE, size_bytes, NOW_S - age_s)
    return Listed(name, size_bytes if has_bytes is None else has_bytes)


def test_a_name_comes_back() -> None:
    """C20: time, size, tokens and what it stands for."""
    name = name_of(NEW, PLACE, 5000, NOW_S + 0.7)
    assert StoredName.parse(str(name)) == name
    assert (name.written_s, name.size_bytes, name.num_tokens, name.place) == (int(NOW_S), 5000, 40, PLACE)


@pytest.mark.parametrize(
    "path",
    ["", "x", "a/b.prefix", f"{PLACE}/1-2-3.prefix", f"../{PLACE}/1-2-3-{'0' * 32}.prefix", f"{PLACE}/.part"],
)
def test_what_is_not_ours_is_left_alone(path: str) -> None:
    """C20: it is neither listed nor removed."""
    assert StoredName.parse(path) is None


def test_namespaces_tokens_models_and_machines_are_told_apart() -> None:
    """C19: what differs in one of them has another name."""
    others = (replace(NEW, namespace=bytes(31) + b"1"), replace(NEW, tokens=key_of(range(41))))
    assert len({id_of(NEW), *map(id_of, others)}) == 3
    assert len({PLACE, place_of("f1e3", ""), place_of("f1e2", "one cpu"), place_of("f1e2o", "ne cpu")}) == 4


def test_what_is_too_old_goes() -> None:
    """C20: by the time in its name."""
    young, old = file(50, 1), file(61, 2)
    assert superfluous([young, old], NOW_S, StoreLimits(10**9, 60)) == [old.name]


def test_the_oldest_go_until_all_fits() -> None:
    """C20: in whatever order they are listed, so machines choose the same."""
    files = [file(age_s, number) for number, age_s in enumerate((30, 10, 40, 20))]
    expected = [files[2].name, files[0].name]
    limits = StoreLimits(250, 10**9)
    assert superfluous(files, NOW_S, limits) == superfluous(files[::-1], NOW_S, limits) == expected
    assert superfluous([files[1], files[3]], NOW_S, limits) == []


def test_of_the_same_prefix_the_newest_stays() -> None:
    """C20: two machines that put it at once leave one."""
    older, newer = file(20, 1), file(10, 1)
    assert superfluous([newer, older], NOW_S, WIDE) == [older.name]


def test_what_is_being_written_stays_until_its_writer_must_be_dead() -> None:
    """C20: it counts, and the whole one of the same prefix stays meanwhile."""
    whole, writing, dead = file(30, 1), file(1, 1, has_bytes=50), file(UNFINISHED_S + 1, 2, has_bytes=50)
    assert superfluous([whole, writing, dead], NOW_S, WIDE) == [dead.name]
    assert superfluous([whole, writing], NOW_S, StoreLimits(150, 10**9)) == [whole.name]


def test_a_file_of_a_clock_far_ahead_is_the_first_to_go() -> None:
    """C20: else it would outlive all others."""
    ahead, behind = file(-AHEAD_S - 5, 1), file(1000, 2)
    assert superfluous([behind, ahead], NOW_S, StoreLimits(150, 10**9)) == [ahead.name]
    near = file(-AHEAD_S + 5, 1)
    assert superfluous([behind, near], NOW_S, StoreLimits(150, 10**9)) == [behind.name]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/mnt/prefixes", "/mnt/prefixes"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("sftp://me:secret@host:22/a?key=secret", "sftp://host:22/a"),
    ],
)
def test_nothing_secret_of_a_url_is_shown(url: str, shown: str) -> None:
    """C19: it stands in status, logs and errors."""
    assert shown_url(url) == shown
