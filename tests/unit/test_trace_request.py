"""How many modules and forms a streamed chat crosses, and how many modules a load: the tool and its bars."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "trace_request.py"
# Seen with the fake backend, of the chat's modules two more: what an idle server does in the seconds before
# differs a little. They may fall, never rise; the tool has the bars of the real model.
NUM_MODULES, NUM_FORMS, NUM_LOAD_MODULES = 95, 14, 12


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("trace_request", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tool, tmp_path_factory):
    """Of a server with the fake backend, each of its processes traced."""
    return tool.traced("fake:", tmp_path_factory.mktemp("trace"))


@pytest.mark.long
def test_a_streamed_chat_crosses_few_modules(report):
    """A newcomer who follows one request reads no more files than these."""
    assert len(report.modules) <= NUM_MODULES, report.text()


def test_a_streamed_chat_has_few_forms(report):
    """What is unpacked only to be packed again is one thing."""
    assert len(report.forms) <= NUM_FORMS, report.text()


def test_a_load_crosses_few_modules(report):
    """From the command in the client to `ready` in the client."""
    assert 0 < len(report.load) <= NUM_LOAD_MODULES, report.text()


def test_each_process_is_seen(report):
    """The server's, the engine's and the worker's: a tool that missed one would count too few."""
    assert {"client.dispatcher", "engine.loop", "chat.template"} <= set(report.modules)


def test_a_form_is_found_by_what_it_holds(tool):
    """Own fields and containers one deep, in slots too; an owner of other things is none."""

    class Holder:
        __slots__ = ("_names", "request_id", "token_ids")

    holder = Holder()
    assert list(tool._marks(holder)) == []
    holder._names = [tool.NAME]
    assert list(tool._marks(holder)) == ["_names:id"]
    holder.token_ids = [5, 7]
    assert "token_ids:tokens" in tool._marks(holder)
    holder._names = []
    holder.token_ids = ["no", "ids"]
    assert list(tool._marks(holder)) == []
