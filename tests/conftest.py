"""What every test starts from."""

import shutil
import signal
import sys

import hypothesis
import pytest

# A machine that does other things too is no fault of what is tested.
hypothesis.settings.register_profile("stoker", deadline=None)
hypothesis.settings.load_profile("stoker")

# A shell that runs us in the background leaves Ctrl-C ignored, for us and for every program we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

VERDICTS = "smoke.json"


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """No test sees what another session, or its user, has stored; servers of a whole module use this one."""
    home = tmp_path_factory.mktemp("cache")
    (home / "stoker").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield home / "stoker"


@pytest.fixture(autouse=True)
def own_cache(session_cache, tmp_path_factory, monkeypatch):
    """No test sees the prefixes of another; only what is known of this machine's build is shared."""
    home = tmp_path_factory.mktemp("cache")
    own = home / "stoker"
    own.mkdir()
    if (session_cache / VERDICTS).exists():
        shutil.copy(session_cache / VERDICTS, own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    if (own / VERDICTS).exists():
        shutil.copy(own / VERDICTS, session_cache)
    shutil.rmtree(home, ignore_errors=True)  # states of a real model take megabytes


def pytest_unconfigure() -> None:
    """The bindings open two files at their import and never close them, which Python warns of at exit."""
    if found := sys.modules.get("llama_cpp._utils"):
        found.outnull_file.close()
        found.errnull_file.close()
