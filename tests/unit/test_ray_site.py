"""The file of a site with `[ray]`, and how many replicas it wants: without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.errors import InvalidRequestError
from stoker.ipc.request import Priority
from stoker.ipc.status import EngineStatus, SlotStatus, WaitStatus
from stoker.ray.autoscaling import InteractivePolicy, ReplicaLoad, ScaleRule, load_of, replicas_wanted
from stoker.ray.site import RaySite, digest_of, read_site, site_of

PERSON, JOB = Priority.INTERACTIVE, Priority.BACKGROUND
RIGHT = """\
port = 8000
slots = 2
max_queue = 7

[models.a]
file = "fake:"

[ray]
min_replicas = 1
max-replicas = 3
gpus = 0.5
resources = { rack = 1 }
"""
RULE = ScaleRule(load=0.8, wait_s=5.0)


def site(tmp_path, text: str) -> RaySite:
    """The site of a file of that text."""
    file = tmp_path / "site.toml"
    file.write_text(text, encoding="utf-8")
    return read_site(file)


# ---------------------------------------------------------------- the file


def test_a_file_of_a_site_goes_over_the_wire_as_plain_values(tmp_path) -> None:
    """P30: what a builder gets on another machine is the same site; a door has no models of its own."""
    found = site(tmp_path, RIGHT)
    assert (found.ray.most_replicas, found.ray.gpus, found.ray.resources) == (3, 0.5, {"rack": 1.0})
    assert site_of(found.as_args()) == found
    assert found.as_args()["engine"]["model_tables"] == {"a": {"file": "fake:"}}
    assert found.door_engine().model_dump(exclude_unset=True) == {"max_queue": 7}


def test_files_named_from_here_are_found_from_anywhere(tmp_path, monkeypatch) -> None:
    """P30: a replica runs in another folder; names that are no files stay names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.jinja").touch()
    (tmp_path / "keys").touch()
    models = 'models = ["a.gguf", "other"]\nlora = ["z=a.gguf@2"]\n'
    found = site(tmp_path, f'{models}chat_template = ["x=b.jinja"]\napi_key_file = "keys"\n')
    assert found.engine.models == (f"{tmp_path}/a.gguf", "other")
    assert found.engine.chat_template == (f"x={tmp_path}/b.jinja",)
    assert found.engine.lora == (f"z={tmp_path}/a.gguf@2",)
    assert found.server.api_key_file == tmp_path / "keys"


@pytest.mark.parametrize(
    ("table", "place", "says"),
    [
        ("cpuz = 1", "ray.cpuz", "did you mean cpus"),
        ("min_replicas = 0", "ray.min_replicas", "1"),
        ("min_replicas = 3\nmax_replicas = 2", "ray.max_replicas", "2 is less than min_replicas, 3"),
        ("resources = { GPU = 1 }", "ray.resources", "cpus and gpus say"),
        ("resources = { rack = -1 }", "ray.resources", "rack: -1"),
        ('name = "a b"', "ray.name", "no name of an application"),
        ('ingress = "window"', "ray.ingress", "'auto', 'door' or 'proxy'"),
    ],
)
def test_a_wrong_table_is_told_with_file_and_key(tmp_path, table: str, place: str, says: str) -> None:
    """P30: before anything is deployed."""
    with pytest.raises(InvalidRequestError) as caught:
        site(tmp_path, f"[ray]\n{table}\n")
    assert caught.value.param == place
    assert caught.value.message.startswith(f"{tmp_path / 'site.toml'}: {place}: ")
    assert says in caught.value.message


def test_config_check_tells_the_mistakes_of_both(tmp_path) -> None:
    """P30: those of the table beside those of the server, each with its line; a right file has none."""
    file = tmp_path / "site.toml"
    file.write_text(
        'slotz = 1\n[ray]\ncpuz = 1\ngpus = "x"\n[models.a]\nfile = "none.gguf"\n', encoding="utf-8"
    )
    told = CliRunner().invoke(app, ["config", "check", str(file)]).output.splitlines()
    places = [line.removeprefix(f"{file}:").split(": ")[:2] for line in told]
    assert places == [["1", "slotz"], ["3", "ray.cpuz"], ["4", "ray.gpus"], ["6", "models.a.file"]]
    file.write_text(RIGHT, encoding="utf-8")
    assert CliRunner().invoke(app, ["config", "check", str(file)]).output == f"{file}: nothing is wrong\n"
    file.write_text("[ray]\nmin_replicas = 3\nmax_replicas = 2\n", encoding="utf-8")
    assert f"{file}:3: ray.max_replicas" in CliRunner().invoke(app, ["config", "check", str(file)]).output


def test_a_digest_is_of_what_it_is_given() -> None:
    """P30: equal settings are equal whatever their order; others are not."""
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_a_replica_comes_with_the_default_model_loaded(tmp_path) -> None:
    """P31: else people who wait would not go there; a table that says so itself is left alone."""
    found = site(tmp_path, '[models.a]\nfile = "fake:"\n[models.b]\nfile = "fake:"\n')
    tables = found.replica_engine().model_tables
    assert [(name, table.load) for name, table in tables.items()] == [("a", True), ("b", False)]
    found = site(tmp_path, '[models.a]\nfile = "fake:"\nload = false\n')
    assert found.replica_engine() == found.engine
    found = site(tmp_path, 'models = ["fake:"]\n')
    assert found.replica_engine() == found.engine


# ---------------------------------------------------------------- how many replicas


def load(interactive: float = 0, wait_s: float = 0, background: float = 0, slots: float = 4) -> ReplicaLoad:
    """What a replica of four slots has."""
    return ReplicaLoad(slots, interactive, background, max(0.0, interactive - slots), wait_s)


def test_interactive_wait_brings_one_more() -> None:
    """P31: where a person would wait longer than the rule says, one more than take requests."""
    assert replicas_wanted([load(3)], RULE) == 1
    assert replicas_wanted([load(3, wait_s=6)], RULE) == 2
    assert replicas_wanted([load(3, wait_s=6), load(0)], RULE) == 3


def test_one_that_is_still_loading_is_the_one_more() -> None:
    """P31: it counts as there, and no other is asked for on top of it."""
    assert replicas_wanted([load(3, wait_s=6), load(0, slots=0)], RULE) == 2
    assert replicas_wanted([load(slots=0)], RULE) == 1


def test_interactive_load_a_slot_brings_as_many_as_it_needs() -> None:
    """P31: 9 requests at 0.8 of 4 slots are 3 replicas."""
    assert replicas_wanted([load(3)], RULE) == 1
    assert replicas_wanted([load(4)], RULE) == 2
    assert replicas_wanted([load(9)], RULE) == 3


def test_background_alone_brings_none_unless_the_rule_says_so() -> None:
    """P31: any amount of it."""
    assert replicas_wanted([load(background=100)], RULE) == 1
    assert replicas_wanted([load(background=9)], ScaleRule(load=0.8, for_background=True)) == 3


def test_one_goes_only_where_the_rest_has_slots_to_spare() -> None:
    """P31: between the two bounds nothing changes, so the number does not swing; never below one."""
    three = [load(), load(), load()]
    assert replicas_wanted(three, RULE) == 1
    assert replicas_wanted([load(2), load(2), load(2)], RULE) == 3
    assert replicas_wanted([load(1), load(1), load(2)], RULE) == 2
    assert replicas_wanted([load(6), load(), load()], RULE) == 3
    for num in range(1, 40):
        there = replicas_wanted([load(num)], RULE)
        assert replicas_wanted([load(num / there)] * there, RULE) == there


def test_the_controller_gets_the_newest_figures_of_each_replica() -> None:
    """P31: series of points by figure and replica; one that said nothing has no slots."""

    def series(*values: float) -> list[SimpleNamespace]:
        return [SimpleNamespace(value=value) for value in values]

    metrics = {
        "slots": {"r1": series(4, 4)},
        "interactive": {"r1": series(0, 4)},
        "wait_s": {"r1": series(0, 9), "gone": series(99)},
    }
    context = SimpleNamespace(raw_metrics=metrics, running_replicas=["r1", "r2"])
    assert InteractivePolicy(load=0.8, wait_s=5.0)(context) == (2, {})
    assert InteractivePolicy(load=0.3, wait_s=50.0)(context) == (4, {})
    starting = SimpleNamespace(raw_metrics=None, running_replicas=["r1"], target_num_replicas=3)
    assert InteractivePolicy()(starting) == (3, {})


def test_a_replica_tells_what_it_has_by_class() -> None:
    """P31: running, queued and parked; a person's wait is that of the last in the queue."""

    def slot(number: int, priority: Priority | None) -> SlotStatus:
        return SlotStatus(id=number, state="idle", model="a", num_tokens=0, priority=priority)

    engine = EngineStatus(
        slots=[slot(0, PERSON), slot(1, JOB), slot(2, None)],
        queue=[
            WaitStatus(request_id="1", priority=PERSON, eta_s=2.0),
            WaitStatus(request_id="2", priority=PERSON, eta_s=7.5),
            WaitStatus(request_id="3", priority=JOB, eta_s=60.0),
        ],
        parked=[WaitStatus(request_id="4", priority=JOB)],
        counters={},
        kv_cells_total=0,
        kv_cells_used=0,
    )
    told = load_of(engine, is_taking=True)
    assert told == {"slots": 3, "interactive": 3, "background": 3, "waiting": 2, "wait_s": 7.5}
    assert ReplicaLoad(**load_of(engine, is_taking=False)).slots == 0
