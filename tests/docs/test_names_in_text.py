"""Routes, variables and flags that stand between backticks in running text exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import options
import pytest
from blocks import pages, spans_of

from stoker import Runtime
from stoker.server.app import create_app, server_context
from stoker.setting_fields import ENV_PREFIX
from stoker.settings import EngineSettings, ServerSettings

OF_OTHER_PROGRAMS = {"moving.md"}
"""Pages that name routes and flags of other servers."""
OF_THE_BENCHMARK = {
    "--costs",
    "--only",
    "--backend-sampling",
    "--budget",
    "--gate",
    "--peer-dir",
    "--repeat",
    "--starts",
}
BESIDE_SETTINGS = {"STOKER_URL", "STOKER_API_KEY", "STOKER_DEBUG", "STOKER_CUDA_GRAPHS"}


def spans() -> Iterator[tuple[str, str]]:
    """Page and what stands between backticks."""
    for page in pages():
        if page.name not in OF_OTHER_PROGRAMS:
            yield from ((page.name, span) for span in spans_of(page))


@pytest.fixture(scope="module")
def routes() -> set[tuple[str, str]]:
    """Method and path of every route, with and without /v1."""
    paths = create_app(server_context(Runtime("fake:"), ServerSettings())).openapi()["paths"]
    found = {(method.upper(), bare(path)) for path, methods in paths.items() for method in methods}
    return found | {(method, path.removeprefix("/v1")) for method, path in found}


def bare(path: str) -> str:
    """A path whose parameters have no names."""
    return re.sub(r"\{[^}]*\}|(?<=/)ID(?=/|$)", "{}", path)


def test_routes_exist(routes):
    """`POST /v1/choose` is one that the server has."""
    named = {
        (page, found[1], bare(found[2]))
        for page, span in spans()
        if (found := re.match(r"(GET|POST|PUT|DELETE) (/[^\s?]*)", span))
    }
    assert named
    assert {each for each in named if each[1:] not in routes} == set()


def test_variables_exist():
    """`STOKER_SLOTS` is a setting or one of the few others that are read."""
    settings = EngineSettings.model_fields | ServerSettings.model_fields
    known = {ENV_PREFIX + name.upper() for name in settings} | BESIDE_SETTINGS
    named = {(page, name) for page, span in spans() for name in re.findall(r"\bSTOKER_[A-Z_]+", span)}
    assert named
    assert {each for each in named if each[1] not in known} == set()


def test_flags_exist():
    """`--slots 4` at the front of a span is an option of some command."""
    named = {(page, found[0]) for page, span in spans() if (found := re.match(r"--[a-z][\w-]+", span))}
    assert named
    assert {each for each in named if each[1] not in options.flags() | OF_THE_BENCHMARK} == set()
