"""Settings: flags beat the environment beats the file, and whatever is wrong is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from stoker.cli.commands.serve import PANELS
from stoker.cli.gate.command import PANELS as GATE_PANELS
from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.setting_fields import parse_size
from stoker.settings import (
    TABLES,
    EngineSettings,
    ServerSettings,
    flag_of,
    is_debug,
    load_settings,
    strange_variables,
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests leaks in."""
    for name in (
        *EngineSettings.model_fields,
        *ServerSettings.model_fields,
        "model",
        "allowed_host",
        "debug",
    ):
        monkeypatch.delenv(f"STOKER_{name.upper()}", raising=False)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes a TOML file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "stoker.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_are_those_of_the_specification() -> None:
    """SPEC I2: host, port, slots, context, isolation."""
    engine, server = load_settings({}, None)
    assert (server.host, server.port) == ("127.0.0.1", 8686)
    assert (engine.slots, engine.ctx_size, engine.threads, engine.isolation) == (8, 16384, 0, "process")
    assert engine.models == ()
    assert (engine.kv_cells, engine.memory_limit, server.api_key_file) == (None, None, None)


def test_the_cache_is_on_unless_it_is_turned_off() -> None:
    """SPEC C10: cells and snapshots, in host memory and on disk; no bytes turn a tier off."""
    engine = EngineSettings()
    assert engine.cache_mode == "live+snapshot"
    assert (engine.cache_ram_bytes, engine.cache_disk_bytes) == (2**30, 4 * 2**30)
    off = engine.replace(cache_mode="off", cache_ram_bytes=0, cache_disk_bytes="0")
    assert (off.cache_mode, off.cache_ram_bytes, off.cache_disk_bytes) == ("off", 0, 0)


def test_flags_beat_the_environment_beats_the_file(
    write_config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC I2: the first of flag, STOKER_*, TOML that names a setting wins."""
    config = write_config("slots = 2\nport = 2222\nctx-size = 2048\n")
    monkeypatch.setenv("STOKER_SLOTS", "3")
    monkeypatch.setenv("STOKER_PORT", "3333")
    engine, server = load_settings({"slots": 4, "port": None}, config)
    assert (engine.slots, server.port, engine.ctx_size) == (4, 3333, 2048)


def test_every_option_can_come_from_the_file(write_config: Callable[[str], Path]) -> None:
    """SPEC I2: each flag's name works in TOML, in the singular or plural, with dashes or underscores."""
    config = write_config(
        'model = ["a", "b"]\nhost = "::1"\nport = 1\nslots = 2\nctx-size = 3\n'
        'threads = "auto"\nkv_cells = 4\n'
        'memory-limit = "4GiB"\ncache-dir = "~/c"\napi-key-file = "k"\nisolation = "thread"\n'
        'watchdog-s = 1.5\ncache-mode = "live"\ncache-ram-bytes = "2GiB"\ncache_disk_bytes = 0\n'
        'max-queue = 5\nallowed-host = "x.example, y.example"\n'
    )
    engine, server = load_settings({}, config)
    assert engine.models == ("a", "b")
    assert (engine.slots, engine.ctx_size, engine.threads, engine.kv_cells, engine.max_queue) == (
        2,
        3,
        0,
        4,
        5,
    )
    assert (engine.memory_limit, engine.cache_dir) == (4 * 1024**3, Path.home() / "c")
    assert (engine.isolation, engine.watchdog_s) == ("thread", 1.5)
    assert (engine.cache_mode, engine.cache_ram_bytes, engine.cache_disk_bytes) == ("live", 2 * 1024**3, 0)
    assert (server.host, server.port, server.api_key_file) == ("::1", 1, Path("k"))
    assert server.allowed_hosts == ("x.example", "y.example")


def test_lists_and_sizes_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC I2: every option also as STOKER_*, spelled as on the command line."""
    monkeypatch.setenv("STOKER_MODEL", "a.gguf, b.gguf")
    monkeypatch.setenv("STOKER_MEMORY_LIMIT", "512MiB")
    monkeypatch.setenv("STOKER_THREADS", "auto")
    monkeypatch.setenv("STOKER_ALLOWED_HOST", "x.example")
    monkeypatch.setenv("STOKER_SOMETHING_ELSE", "1")
    engine, server = load_settings({}, None)
    assert engine.models == ("a.gguf", "b.gguf")
    assert (engine.memory_limit, engine.threads) == (512 * 1024**2, 0)
    assert server.allowed_hosts == ("x.example",)


def test_settings_made_in_code_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read in one place; a library user gets what was written."""
    monkeypatch.setenv("STOKER_SLOTS", "3")
    assert EngineSettings().slots == 8


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("123", 123),
        ("4GiB", 4 * 1024**3),
        ("1.5g", 3 * 2**29),
        ("2 MB", 2_000_000),
        ("7k", 7168),
        ("1TiB", 1024**4),
    ],
)
def test_sizes_are_understood(text: str, num_bytes: int) -> None:
    """SPEC I2: bytes, or a number with a unit."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4QiB", "-1", "1e9", "4 4"])
def test_other_sizes_are_refused_with_an_example(text: str) -> None:
    """What bad input gets: the error shows what would have been right."""
    with pytest.raises(InvalidRequestError, match="4GiB") as caught:
        load_settings({"memory_limit": text}, None)
    assert caught.value.param == "memory_limit"


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 257}, "slots"),
        ({"port": 65536}, "port"),
        ({"port": "x"}, "port"),
        ({"threads": "many"}, "threads"),
        ({"isolation": "container"}, "isolation"),
        ({"watchdog_s": 0}, "watchdog_s"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"max_queue": 0}, "max_queue"),
        ({"cache_mode": "both"}, "cache_mode"),
        ({"cache_ram_bytes": -1}, "cache_ram_bytes"),
        ({"cache_disk_bytes": "lots"}, "cache_disk_bytes"),
    ],
)
def test_values_out_of_range_are_refused_by_flag(flags: dict[str, object], param: str) -> None:
    """On the command line the flag is wrong; its value is shown, and no words of a library (D20)."""
    with pytest.raises(InvalidRequestError, match=f"^--{param.replace('_', '-')}: ['0-9-]") as caught:
        load_settings(flags, None)
    assert caught.value.param == param
    assert str(flags[param]) in caught.value.message
    assert not re.search(r"[Ii]nput|[Vv]alid|field|string", caught.value.message)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("STOKER_SLOTS", "many", "STOKER_SLOTS: 'many' is no whole number"),
        ("STOKER_ALLOWED_HOST", "", None),
        ("stoker_slots", "0", "STOKER_SLOTS: '0' is less than 1"),
        (
            "STOKER_CORS_ORIGIN",
            "x",
            "STOKER_CORS_ORIGIN: 'x' is not an origin; write scheme://host[:port], or * for every one",
        ),
    ],
)
def test_a_value_of_the_environment_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str | None
) -> None:
    """A forgotten variable can be found (D20)."""
    monkeypatch.setenv(variable, value)
    if text is None:
        load_settings({}, None)
        return
    with pytest.raises(InvalidRequestError) as caught:
        load_settings({}, None)
    assert caught.value.message == text


def test_a_value_of_the_file_is_refused_by_its_key_and_the_file_once(
    write_config: Callable[[str], Path],
) -> None:
    """As the key is spelled there (D20)."""
    config = write_config('ctx-size = "big"\n')
    with pytest.raises(InvalidRequestError) as caught:
        load_settings({}, config)
    assert caught.value.message == f"ctx-size in {config}: 'big' is no whole number"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max-step-ms = true", "max-step-ms in {}: true is no number"),
        ("slots = false", "slots in {}: false is no number"),
        ("gpu_layers = true", "gpu_layers in {}: true is no number"),
        ("[models.m]\nfile = 'x'\nslots = true", "models.m.slots in {}: true is no number"),
        ('mmap = "true"', "{}: mmap: write true or false, without quotes, not 'true'"),
        ("mmap = 1", "{}: mmap: write true or false, without quotes, not 1"),
    ],
)
def test_a_value_of_the_file_has_the_kind_that_its_setting_has(
    write_config: Callable[[str], Path], text: str, problem: str
) -> None:
    """A file has kinds of its own, of which a variable, that is text, has none (D20)."""
    config = write_config(text)
    with pytest.raises(InvalidRequestError) as caught:
        load_settings({}, config)
    assert caught.value.message == problem.format(config)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("STOKER_SLOTZ", "STOKER_SLOTS"),
        ("STOKER_MODLE", "STOKER_MODEL"),
        ("STOKER_KEEPALIVES", "STOKER_KEEPALIVE_S"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    """Documents: STOKER_SLOTZ=3 is no silent default."""
    monkeypatch.setenv(variable, "3")
    with pytest.raises(InvalidRequestError) as caught:
        load_settings({}, None)
    assert caught.value.message == f"there is no setting {variable}; did you mean {meant}?"


def test_variables_that_are_nothing_like_a_setting_are_told_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents: a container's platform sets some of its own; those of commands are known."""
    before = strange_variables()
    for variable in (
        "STOKER_SERVICE_HOST",
        "STOKER_PORT_8686_TCP",
        "STOKER_URL",
        "STOKER_API_KEY",
        "STOKER_DEBUG",
    ):
        monkeypatch.setenv(variable, "1")
    assert set(strange_variables()) - set(before) == {"STOKER_SERVICE_HOST", "STOKER_PORT_8686_TCP"}
    load_settings({}, None)


def test_every_setting_is_an_option_of_serve_in_one_panel() -> None:
    """Documents: drain_s, n_batch, models_dir and their like had none. Those of machines are the gate's."""
    offered = " ".join([*PANELS.values(), GATE_PANELS["Machines"]]).split()
    fields = {*EngineSettings.model_fields, *ServerSettings.model_fields}
    assert sorted(offered) == sorted(fields - TABLES)


def test_an_unknown_key_is_refused_with_the_nearest_known(write_config: Callable[[str], Path]) -> None:
    """What bad input gets: a typo in the file is not silently the default."""
    with pytest.raises(
        InvalidRequestError, match=r"stoker\.toml: there is no setting 'ctx_sise'; did you mean ctx_size\?$"
    ):
        load_settings({}, write_config("ctx_sise = 1\n"))


def test_an_unknown_field_is_refused_in_code_too() -> None:
    """What bad input gets: Runtime(slotz=...) names its mistake."""
    with pytest.raises(InvalidRequestError, match="did you mean slots"):
        EngineSettings(slotz=1)  # type: ignore[call-arg]  # that is the point
    with pytest.raises(InvalidRequestError, match="slots"):
        EngineSettings().replace(slots=-1)


def test_a_file_that_is_not_toml_is_refused_with_the_place(write_config: Callable[[str], Path]) -> None:
    """What bad input gets: file, line and column."""
    with pytest.raises(InvalidRequestError, match=r"stoker\.toml is not valid TOML.*line 1"):
        load_settings({}, write_config("slots = = 1"))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    """What bad input gets: no such file, one clear line."""
    with pytest.raises(MachineSetupError, match=r"gone\.toml.*No such file"):
        load_settings({}, tmp_path / "gone.toml")


def test_settings_are_immutable_and_copies_are_validated() -> None:
    """Frozen."""
    settings = EngineSettings(slots=2)
    with pytest.raises(ValidationError, match="frozen"):
        settings.slots = 3
    changed = settings.replace(ctx_size=77)
    assert (settings.ctx_size, changed.slots, changed.ctx_size) == (16384, 2, 77)


@pytest.mark.parametrize(("value", "answer"), [("1", True), ("0", False), ("", False)])
def test_debug_is_an_environment_variable(
    value: str, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STOKER_DEBUG=1 shows tracebacks."""
    monkeypatch.setenv("STOKER_DEBUG", value)
    assert is_debug() is answer


IN_WORDS = {
    "": (None, ()),
    "embedded default": ((),),
    "none": (None, ()),
    "no key": (None,),
    "as --ctx-size": (None,),
    "512, on a device 2048 or 8192": (None,),
    "what the machine has": (None,),
    "stderr": (None,),
    "the model's own": ((),),
    "what its labels say": ((),),
    "by the machine's memory": (None,),
    "all there are": ((),),
    "none where it fits on one, else layer": (None,),
    "by their free memory": ((),),
    "the freest": (None,),
    "as many as have to": (None,),
    "all where they fit, else what is left": (None,),
    "f16, bf16 keys where --repeatable needs them": (None,),
    "as for all": ({},),
    "as the template has it": (None,),
}
"""Defaults that are shown in words or not at all, and what they stand for."""


@pytest.mark.parametrize("name", " ".join(PANELS.values()).split())
def test_an_option_shows_the_default_and_has_the_name_that_its_setting_has(name: str) -> None:
    """SPEC I2: what `--help` promises is what a program gets that says nothing."""
    flag = flag_of(name)
    engine, server = load_settings({}, None)
    default = getattr(engine if name in EngineSettings.model_fields else server, name)
    option = flag.names[0].partition("/")[0].removeprefix("--").replace("-", "_")
    if flag.shown in IN_WORDS:
        assert isinstance(default, Path) or default in IN_WORDS[flag.shown]
        assert load_settings({option: default}, None) == (engine, server)
    else:
        shown = {"yes": "true", "no": "false"}.get(flag.shown, flag.shown)
        assert load_settings({option: shown}, None) == (engine, server)


def test_where_a_model_lies_is_said_for_all_and_for_one(
    write_config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R11: a table of a model in the file, a flag and a variable say the same."""
    table = """
        gpu-layers = "all"
        device = ["CUDA0", 1]
        tensor-split = [3, 1]
        [placement."small:q4"]
        gpu-layers = 20
        mmap = false
    """
    engine, _ = load_settings({}, write_config(table))
    assert (engine.gpu_layers, engine.device, engine.tensor_split) == ("all", ("CUDA0", "1"), (3.0, 1.0))
    assert engine.placement["small:q4"].model_dump(exclude_unset=True) == {"gpu_layers": 20, "mmap": False}
    flags = ["small:q4:gpu_layers=20", "small:q4:mmap=false"]
    same = {"gpu_layers": "ALL", "device": ["CUDA0,1"], "tensor_split": ["3,1"], "placement": flags}
    assert load_settings(same, None)[0] == engine
    for name, value in {**same, "device": "CUDA0,1", "tensor_split": "3,1"}.items():
        text = ",".join(value) if isinstance(value, list) else value
        monkeypatch.setenv(f"STOKER_{name.upper()}", str(text))
    assert load_settings({}, None)[0] == engine


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gpu_layers", "most", "'most' is neither a number of layers nor auto or all"),
        ("device", "none,CUDA0", "none and cpu stand alone, got none, CUDA0"),
        ("tensor_split", "3,x", "'3,x' are no proportions; write such as 3,1"),
        ("tensor_split", "0,0", "'0,0' are no proportions; write such as 3,1"),
        ("split_mode", "tensor", "'tensor' is none of 'none', 'layer' or 'row'"),
        ("kv_type", "q3", "'q3' is none of 'f16', 'bf16', 'q8_0' or 'q4_0'"),
        ("cpu_moe", -1, "-1 is less than 0"),
        ("placement", "small", "'small' is not of the form MODEL:KEY=VALUE, such as small:gpu_layers=20"),
        ("placement", "small:layers=1", "small: layers: there is no such setting"),
        ("placement", {"small": 3}, "small: a table of settings is taken, such as gpu_layers = 20"),
    ],
)
def test_where_no_model_can_lie_is_refused_by_name(name: str, value: object, text: str) -> None:
    """SPEC R11: the message says what there is."""
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as caught:
        load_settings({name: value}, None)
    assert caught.value.param == name


def test_every_setting_says_what_it_is() -> None:
    """SPEC I2: also those that have no option."""
    for fields in (EngineSettings.model_fields, ServerSettings.model_fields):
        assert [name for name, field in fields.items() if not field.description] == []
