from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hub_stand_in import HubStandIn
from stoker.errors import DownloadError, InvalidRequestError, MachineSetupError, ModelNotFoundError
from stoker.models.hub.downloads import HubReference
from stoker.models.hub.hub import PullRequest, pull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "tiny-Q4_K_M.gguf"
CONTENT = bytes(range(256)) * 12_000


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    """A hub with one model of 3 MB."""
    with HubStandIn(files={NAME: CONTENT, "README.md": b"hello"}) as stand_in:
        yield stand_in


def ignore(done: int, total: int, name: str) -> None:
    """A progress callback nobody watches."""


def request(
    hub: HubStandIn, folder: Path, reference: str = "acme/tiny-GGUF", attempts: int = 3
) -> PullRequest:
    """A pull from the stand-in that does not wait between tries."""
    return PullRequest(
        reference=reference, models_dir=folder, endpoint=hub.endpoint, attempts=attempts, backoff_s=0.0
    )


def leftovers(folder: Path) -> list[str]:
    """Files that are no models."""
    return [path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".gguf"]


def test_a_pulled_file_is_whole_plain_and_where_it_belongs(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: the file comes to lie in OWNER/REPO, without links or partial files beside it."""
    path = pull(request(hub, tmp_path), ignore)
    assert path == tmp_path / "acme" / "tiny-GGUF" / NAME
    assert path.read_bytes() == CONTENT
    assert not path.is_symlink()
    assert leftovers(tmp_path) == []


def test_progress_counts_up_to_the_size(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: progress is shown as bytes here, bytes in all and the file's name."""
    seen: list[tuple[int, int, str]] = []
    pull(request(hub, tmp_path), lambda *step: seen.append(step))
    counts = [done for done, _, _ in seen]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(CONTENT))
    assert {(total, name) for _, total, name in seen} == {(len(CONTENT), NAME)}


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: downloads resume; no byte is served twice."""
    hub.cut_after[NAME] = [1_500_000]
    path = pull(request(hub, tmp_path), ignore)
    assert path.read_bytes() == CONTENT
    assert hub.bytes_served == len(CONTENT)
    first, second = hub.file_requests()
    assert first is None
    assert second == "bytes=1500000-"


def test_a_pull_that_gave_up_is_continued_by_the_next(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: what arrived is kept under a partial name and a later run asks for the rest only."""
    hub.cut_after[NAME] = [1_000_000]
    with pytest.raises(DownloadError, match="kept"):
        pull(request(hub, tmp_path, attempts=1), ignore)
    (partial,) = leftovers(tmp_path)
    assert partial.endswith(".incomplete")
    assert not (tmp_path / "acme/tiny-GGUF" / NAME).exists()
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT
    assert hub.bytes_served == len(CONTENT)


def test_many_breaks_are_survived_while_bytes_arrive(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: only tries in which nothing arrives count towards giving up."""
    hub.cut_after[NAME] = [300_000] * 9
    assert pull(request(hub, tmp_path, attempts=2), ignore).read_bytes() == CONTENT


def test_a_server_without_ranges_is_asked_for_everything_again(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a 200 instead of a 206 never leaves old bytes before new ones."""
    hub.knows_ranges = False
    hub.cut_after[NAME] = [1_000_000]
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT


def test_a_partial_file_of_another_version_is_not_continued(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a resumed file never mixes two versions."""
    hub.cut_after[NAME] = [1_000_000]
    with pytest.raises(DownloadError):
        pull(request(hub, tmp_path, attempts=1), ignore)
    hub.files[NAME] = CONTENT[::-1]
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT[::-1]


def test_a_wrong_hash_is_removed_and_reported(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: sha256 is verified; a corrupt file is removed, partial one included."""
    hub.announced[NAME] = "0" * 64
    with pytest.raises(DownloadError, match="not what the hub announced"):
        pull(request(hub, tmp_path), ignore)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_small_file_is_verified_by_its_git_hash(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a file outside large-file storage has no sha256 and is verified all the same."""
    hub.plain.add(NAME)
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT


def test_an_intact_file_is_not_fetched_again_and_a_damaged_one_is(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: what is here is believed by its hash, not by its name."""
    path = pull(request(hub, tmp_path), ignore)
    pull(request(hub, tmp_path), ignore)
    assert len(hub.file_requests()) == 1
    path.write_bytes(CONTENT[:-1] + b"x")
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT
    assert len(hub.file_requests()) == 2


def test_a_link_in_the_way_is_replaced_not_followed(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: final files are plain files; a link's target stays as it was."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    path = tmp_path / "acme/tiny-GGUF" / NAME
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT
    assert not path.is_symlink()
    assert target.read_bytes() == b"mine"


def test_a_failing_server_is_asked_again(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a 500 and a 503 are retried, for the listing and for the file."""
    hub.listing_failures, hub.failures = [503], [500, 503]
    assert pull(request(hub, tmp_path), ignore).read_bytes() == CONTENT


def test_retries_wait_longer_each_time(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L7: retry with back-off, then an error with the count and the status."""
    waits: list[float] = []
    monkeypatch.setattr("stoker.models.hub.hub.time.sleep", waits.append)
    hub.failures = [500] * 4
    plain = PullRequest(reference="acme/tiny-GGUF", models_dir=tmp_path, endpoint=hub.endpoint, attempts=4)
    with pytest.raises(DownloadError, match=r"failed 4 times.*500"):
        pull(plain, ignore)
    assert waits == [1.0, 2.0, 4.0]


def test_no_server_is_called_offline(tmp_path: Path) -> None:
    """SPEC L7: offline is an error that says so."""
    with HubStandIn() as gone:
        address = gone
    with pytest.raises(DownloadError, match="offline"):
        pull(request(address, tmp_path), ignore)


def test_a_missing_repository_says_what_to_do(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: no such repository is a typed error that names it."""
    with pytest.raises(ModelNotFoundError, match=r"acme/nothing.*check the name.*HF_TOKEN"):
        pull(request(hub, tmp_path, "acme/nothing"), ignore)
    assert len(hub.requests) == 1


def test_an_answer_that_is_no_listing_is_a_typed_error(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L7: a login page in the way is told from a hub."""
    answers: list[object] = [[], {"siblings": [{"size": 1}]}]
    for body in answers:
        monkeypatch.setattr(hub, "listing", lambda body=body: body)
        with pytest.raises(DownloadError, match="no listing"):
            pull(request(hub, tmp_path), ignore)


def test_a_gated_repository_says_what_to_do(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: terms that have to be accepted are named, not retried."""
    hub.error_code, hub.error_status = "GatedRepo", 403
    with pytest.raises(DownloadError, match=r"gated: accept its terms.*HF_TOKEN"):
        pull(request(hub, tmp_path), ignore)
    assert len(hub.requests) == 1


def test_a_missing_file_lists_what_there_is(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a file or quantisation that is not there is a typed error with the names that are."""
    for selector in ("other.gguf", "Q8_0"):
        with pytest.raises(ModelNotFoundError, match=NAME):
            pull(request(hub, tmp_path, f"acme/tiny-GGUF:{selector}"), ignore)


def test_a_file_that_vanishes_after_the_listing_is_a_typed_error(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a 404 for the file itself is not retried."""
    hub.failures = [404]
    with pytest.raises((DownloadError, ModelNotFoundError), match=NAME):
        pull(request(hub, tmp_path), ignore)
    assert len(hub.file_requests()) == 1


def test_a_server_that_sends_too_much_is_stopped(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: the announced size is a bound; nothing beyond it is written."""
    hub.short_by[NAME] = 1000
    with pytest.raises(DownloadError, match="more than"):
        pull(request(hub, tmp_path), ignore)


def test_file_names_that_leave_the_folder_are_refused(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: a hub cannot write outside the models folder."""
    hub.files = {"../../evil.gguf": CONTENT}
    with pytest.raises(DownloadError, match="refused"):
        pull(request(hub, tmp_path / "models"), ignore)
    assert list(tmp_path.rglob("*.gguf")) == []


def test_two_pulls_of_one_file_do_not_mix(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: the second of two pulls at once is refused while the first writes."""
    refusals: list[str] = []

    def again(done: int, total: int, name: str) -> None:
        if not refusals:
            with pytest.raises(DownloadError, match="another pull") as caught:
                pull(request(hub, tmp_path), ignore)
            refusals.append(str(caught.value))

    assert pull(request(hub, tmp_path), again).read_bytes() == CONTENT
    assert len(refusals) == 1


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L7: too little room is an error with both numbers."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("stoker.models.hub.hub.shutil.disk_usage", lambda _: usage)
    with pytest.raises(MachineSetupError, match=f"1000 bytes free.*{len(CONTENT)}"):
        pull(request(hub, tmp_path), ignore)
    assert hub.file_requests() == []


def test_the_address_of_the_hub_comes_from_the_environment(hub: HubStandIn, tmp_path: Path) -> None:
    """SPEC L7: HF_ENDPOINT moves every request to another hub."""
    script = (
        "import sys, pathlib; from stoker.models.hub.hub import PullRequest, pull\n"
        "request = PullRequest(reference=sys.argv[1], models_dir=pathlib.Path(sys.argv[2]))\n"
        "print(pull(request, lambda *_: None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "acme/tiny-GGUF", str(tmp_path)],
        env=os.environ | {"HF_ENDPOINT": hub.endpoint},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(NAME)
    assert (tmp_path / "acme/tiny-GGUF" / NAME).read_bytes() == CONTENT


def test_all_shards_of_a_split_model_are_fetched(tmp_path: Path) -> None:
    """SPEC L7, R7: one reference brings every shard; the first one is returned."""
    names = [f"big-Q4_K_M-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    with HubStandIn(files={name: CONTENT[:1000] + name.encode() for name in names}) as hub:
        path = pull(request(hub, tmp_path, "acme/tiny-GGUF:Q4_K_M"), ignore)
    assert path.name == names[0]
    assert sorted(each.name for each in path.parent.iterdir()) == names


@pytest.mark.parametrize(
    ("names", "selector", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q5_K_M.gguf"], "", "m-Q4_K_M.gguf"),
        (["m-Q8_0.gguf", "m-Q5_0.gguf", "m-F16.gguf"], "", "m-Q5_0.gguf"),
        (["m-f16.gguf", "m-q8_0.gguf"], "", "m-q8_0.gguf"),
        (["mmproj-m-Q4_K_M.gguf", "m-F16.gguf"], "", "m-F16.gguf"),
        (["plain.gguf", "README.md"], "", "plain.gguf"),
        (["m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], "q4_k_s", "m-Q4_K_S.gguf"),
        (["m-IQ4_XS.gguf", "m-Q4_0.gguf"], "Q4_0", "m-Q4_0.gguf"),
        (["a/m-Q8_0.gguf", "b/m-Q2_K.gguf"], "m-Q2_K.gguf", "b/m-Q2_K.gguf"),
        (["mmproj-m-F16.gguf", "m-Q4_0.gguf"], "mmproj-m-F16.gguf", "mmproj-m-F16.gguf"),
    ],
)
def test_a_sensible_file_is_chosen(names: list[str], selector: str, chosen: str) -> None:
    """SPEC L7: REPO prefers Q4_K_M, then Q5, Q8, any; REPO:QUANT and REPO:FILE mean what they say."""
    assert HubReference("a/b", selector).choose(names) == (chosen,)


def test_a_repository_that_lacks_a_shard_is_refused() -> None:
    """SPEC R7: the missing shard is named before anything is fetched."""
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00002\.gguf"):
        HubReference("a/b").choose(["m-00001-of-00002.gguf"])


@pytest.mark.parametrize(
    "text", ["", "model", "a/b/c", "../b", "a/..", "a/b:../x.gguf", "a/b:/etc/x", "a b/c", "a/b:x\0y"]
)
def test_references_that_make_no_sense_are_refused(text: str) -> None:
    """SPEC L7: a malformed reference is the caller's error and says how one is written."""
    with pytest.raises(InvalidRequestError):
        HubReference.parse(text)
