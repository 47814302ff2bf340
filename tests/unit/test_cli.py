"""The command line: what each command asks of the parts behind it, and how errors end it."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.chat.template import ChatTemplate
from stoker.cli import download, logs, session
from stoker.cli.app import app
from stoker.cli.commands import doctor
from stoker.cli.session import Activity
from stoker.client.requests.stream import TextDelta, text_deltas
from stoker.errors import DownloadError, ModelFileError
from stoker.ipc.events import Delta, Finished, ModelState, PrefillProgress
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import Timings, Usage
from stoker.machine.cores import BusyProcess, CoreUse
from stoker.models.hub import hub
from stoker.server import serve
from stoker.settings import EngineSettings, ServerSettings
from stoker.tasks.fields import request_of
from terminal import Terminal
from tiny_models import write_llama
from tiny_projector import write_projector

ANSWER = ("Hello", " there", ".")


class RuntimeStandIn:
    """Answers every request with the same words and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.settings = EngineSettings()
        self.is_closed = False
        self.start_error: BaseException | None = None
        self.stream_error: BaseException | None = None
        self.mid_answer: Callable[[], None] | None = None
        self.on_load: Callable[[ModelState], None] | None = None
        self.id = "stand-in"

    def __call__(self, settings: EngineSettings) -> RuntimeStandIn:
        """The factory that hands itself out."""
        self.settings = settings
        return self

    async def start(self) -> None:
        """Report a load, or fail."""
        if self.start_error:
            raise self.start_error
        assert self.on_load
        self.on_load(ModelState(model=self.id, state="loading", stage="weights", fraction=0.5))

    async def close(self) -> None:
        """Note that it happened."""
        self.is_closed = True

    takes_conversations = True

    def resolve(self, model: str | None) -> RuntimeStandIn:
        """Itself, for its id and what it takes."""
        return self

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """ChatML."""
        return ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}").render(
            messages
        )

    async def generate(self, prompt: str, **fields: Any) -> AsyncIterator[TextDelta]:
        """Its words, as the library hands them out."""
        on_notice = fields.pop("on_notice", None)
        request = request_of(prompt, fields)
        async with aclosing(text_deltas(request, self.stream(request), on_notice)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(self, messages: list[dict[str, str]], **fields: Any) -> AsyncIterator[TextDelta]:
        """The same for a conversation."""
        async with aclosing(self.generate(self.render_chat(messages), is_chat=True, **fields)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Any]:
        """Progress, three deltas, the end."""
        self.requests.append(request)
        if self.stream_error:
            error, self.stream_error = self.stream_error, None
            raise error
        yield PrefillProgress(request_id="r", total=100, cached=0, processed=50, time_ms=1.0)
        for text in ANSWER:
            yield Delta(request_id="r", index=0, text=text, token_ids=[1])
            if self.mid_answer:
                act, self.mid_answer = self.mid_answer, None
                act()
                await asyncio.Event().wait()  # until it is cancelled
        yield Delta(request_id="r", index=0, finish_reason=FinishReason.STOP)
        yield Finished(
            request_id="r",
            usage=Usage(prompt_tokens=9, completion_tokens=3),
            timings=Timings(prefill_s=0.1, decode_s=0.5),
        )


@pytest.fixture
def runtime() -> RuntimeStandIn:
    """A stand-in that a command gets in place of a real runtime."""
    return RuntimeStandIn()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models and cache of nobody's home."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STOKER_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def invoke(*arguments: str, runtime: RuntimeStandIn | None = None, stdin: str | None = None) -> Any:
    """One call of the program."""
    return CliRunner().invoke(app, list(arguments), obj=runtime, input=stdin)


# ---------------------------------------------------------------- run


def test_run_streams_the_answer_to_stdout(runtime: RuntimeStandIn) -> None:
    """SPEC I1: `stoker run PROMPT` answers with the chat template around the prompt, and ends the line."""
    result = invoke("run", "Hi", runtime=runtime)
    assert (result.exit_code, result.stdout) == (0, "Hello there.\n")
    assert runtime.requests[0].prompt == "[user] Hi\n"
    assert runtime.requests[0].is_chat
    assert runtime.is_closed


@pytest.mark.parametrize(("cached", "shown"), [(320, ", 320 from the cache"), (0, "")])
def test_reading_a_prompt_shows_what_was_cached(cached: int, shown: str) -> None:
    """SPEC C13: a person sees why a long prompt is read so soon."""
    with Activity() as activity:
        activity.on_prefill(
            PrefillProgress(request_id="r", total=400, cached=cached, processed=350, time_ms=1.0)
        )
        bar = activity._progress.tasks[0]
    assert bar.description == f"reading the prompt: 350 of 400 tokens{shown}"


def test_run_takes_the_sampling_it_is_told(runtime: RuntimeStandIn) -> None:
    """SPEC I1: options reach the request and the engine."""
    options = ("--max-tokens", "7", "--temperature", "0", "--seed", "5", "--ctx-size", "64", "--threads", "2")
    invoke("run", "Hi", "--model", "x.gguf", *options, runtime=runtime)
    request = runtime.requests[0]
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (7, 0.0, 5)
    assert runtime.settings.models == ("x.gguf",)
    assert (runtime.settings.ctx_size, runtime.settings.threads) == (64, 2)


def test_run_raw_leaves_the_text_as_it_is(runtime: RuntimeStandIn) -> None:
    """SPEC I1: --raw uses no template and lets the tokenizer add its special tokens."""
    invoke("run", "--raw", "Once upon", runtime=runtime)
    assert (runtime.requests[0].prompt, runtime.requests[0].is_chat) == ("Once upon", False)


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"]])
def test_run_reads_the_prompt_from_a_pipe(arguments: list[str], runtime: RuntimeStandIn) -> None:
    """SPEC I1: what is piped in is the prompt when there is no other."""
    invoke(*arguments, "--raw", runtime=runtime, stdin="from a pipe")
    assert runtime.requests[0].prompt == "from a pipe"


def test_run_adds_a_redirected_file_to_the_prompt(
    runtime: RuntimeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC I1: `stoker run "Summarise this" < file` asks about the file."""
    report = tmp_path / "report.txt"
    report.write_text("the report", encoding="utf-8")
    with report.open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert session.piped_beside_a_prompt() == "the report"


def test_run_does_not_wait_for_a_pipe_that_nobody_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC I1: a program started by another one often has such a pipe; the prompt is answered without it."""
    reading, writing = os.pipe()
    monkeypatch.setattr(session, "FIRST_BYTE_S", 0.0)
    with os.fdopen(reading) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert session.piped_beside_a_prompt() == ""
        os.write(writing, b"late")
        os.close(writing)
        assert session.piped_beside_a_prompt() == "late"


def test_run_without_any_prompt_says_so(runtime: RuntimeStandIn) -> None:
    """What bad input gets: one clear line, exit code 2, nothing loaded."""
    result = invoke("run", runtime=runtime, stdin="")
    assert result.exit_code == 2
    assert "there is no prompt" in result.stderr
    assert not runtime.requests


def test_an_error_is_one_line_on_stderr_and_exit_code_2(runtime: RuntimeStandIn) -> None:
    """What bad input gets: a broken file is named with its reason; no traceback."""
    runtime.start_error = ModelFileError("x.gguf is not a GGUF file: it starts with 'MZ'")
    result = invoke("run", "Hi", runtime=runtime)
    assert result.exit_code == 2
    assert result.stderr == "stoker: x.gguf is not a GGUF file: it starts with 'MZ'\n"
    assert result.stdout == ""
    assert runtime.is_closed


def test_debug_shows_where_an_error_came_from(
    runtime: RuntimeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STOKER_DEBUG=1 adds the traceback."""
    monkeypatch.setenv("STOKER_DEBUG", "1")
    runtime.start_error = ModelFileError("broken")
    assert "Traceback" in invoke("run", "Hi", runtime=runtime).stderr


def test_ctrl_c_ends_run_with_130(runtime: RuntimeStandIn) -> None:
    """An interrupted answer is no error message, and the runtime is closed."""
    runtime.mid_answer = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = invoke("run", "Hi", runtime=runtime)
    assert (result.exit_code, result.stdout) == (130, "Hello\n")
    assert runtime.is_closed


@pytest.mark.long
def test_a_closed_pipe_ends_run_quietly() -> None:
    """I1: `stoker run ... | head -1` leaves no traceback."""
    code = (
        "import sys\nfrom tests.unit.test_cli import RuntimeStandIn\nfrom stoker.cli.app import app\n"
        "sys.argv = ['stoker', 'run', 'Hi']\napp(obj=RuntimeStandIn())"
    )
    reading, writing = os.pipe()
    os.close(reading)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root / "src", root, root / "tests")))},
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_wrong_setting_is_named_before_anything_starts(runtime: RuntimeStandIn) -> None:
    """What bad input gets: the option and what it may be."""
    result = invoke("run", "Hi", "--threads", "many", runtime=runtime)
    assert result.exit_code == 2
    assert result.stderr.startswith("stoker: --threads: ")


@pytest.mark.long
def test_run_answers_through_a_real_engine() -> None:
    """SPEC I1, R9: the same seed gives the same answer from an engine process; nothing on stderr."""
    command = ("run", "Hi", "--model", "fake:", "--seed", "3", "--max-tokens", "8")
    answers = [
        subprocess.run(
            [sys.executable, "-m", "stoker.cli", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    assert answers[0].stdout == answers[1].stdout != "\n"
    assert [answer.stderr for answer in answers] == ["", ""]


def test_run_names_a_broken_file_and_its_reason(tmp_path: Path) -> None:
    """What bad input gets: a foreign file is exit code 2 and one line; nothing is loaded."""
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"MZ, a program" * 9)
    result = invoke("run", "Hi", "--model", str(junk))
    assert result.exit_code == 2
    assert "junk.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_run_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    """What bad input gets: no such file, one line."""
    result = invoke("run", "Hi", "--model", str(tmp_path / "gone.gguf"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "gone.gguf" in result.stderr


# ---------------------------------------------------------------- serve


def stand_in_server(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineSettings, ServerSettings]]:
    """Puts a server that only notes its settings in the real one's place."""
    seen: list[tuple[EngineSettings, ServerSettings]] = []

    def run_server(engine: EngineSettings, server: ServerSettings, *_: object) -> int:
        seen.append((engine, server))
        return 0

    monkeypatch.setattr(serve, "run_server", run_server)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)  # the log is this process's
    return seen


def test_serve_hands_every_flag_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SPEC I2: all options of the command line end in the two settings objects."""
    seen = stand_in_server(monkeypatch)
    options = (
        "--model a --model b --host ::1 --port 1 --slots 2 --ctx-size 3 --threads auto --kv-cells 4 "
        f"--memory-limit 4GiB --cache-dir {tmp_path} --api-key-file k --isolation thread --watchdog-s 5 "
        "--max-queue 6 --allowed-host x --allowed-host y --policy balanced --target-step-ms 40 "
        "--max-step-ms 300 --background-patience-s 7 --park-bytes 2MiB "
        "--cache-mode snapshot --cache-ram-bytes 3MiB --cache-disk-bytes 0 "
        "--memory-margin 1MiB --keep-alive 5m --default-max-tokens 8 --suspend-grace-s 9 --restore "
        f"--heat-trace t --run-dir {tmp_path} --no-follow-sleep"
    )
    assert invoke("serve", *options.split()).exit_code == 0
    engine, server = seen[0]
    assert engine == EngineSettings(
        models=("a", "b"),
        slots=2,
        ctx_size=3,
        threads=0,
        kv_cells=4,
        memory_limit=4 * 1024**3,
        cache_dir=tmp_path,
        models_dir=tmp_path / "models",
        isolation="thread",
        watchdog_s=5.0,
        max_queue=6,
        policy="balanced",
        target_step_ms=40.0,
        max_step_ms=300.0,
        background_patience_s=7.0,
        park_bytes=2 * 1024**2,
        cache_mode="snapshot",
        cache_ram_bytes=3 * 1024**2,
        cache_disk_bytes=0,
        memory_margin=1024**2,
        keep_alive=300.0,
        default_max_tokens=8,
        suspend_grace_s=9.0,
        restore=True,
        heat_trace=Path("t"),
        run_dir=tmp_path,
    )
    assert server == ServerSettings(
        host="::1", port=1, api_key_file=Path("k"), allowed_hosts=("x", "y"), follow_sleep=False
    )


def test_serve_names_the_modes_of_the_cache_to_who_invents_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC C10, I2: nothing is served; the error lists what there is."""
    seen = stand_in_server(monkeypatch)
    result = invoke("serve", "--cache-mode", "everything")
    assert (result.exit_code, seen) == (2, [])
    assert all(mode in result.stderr for mode in ("off", "live", "snapshot", "live+snapshot"))


def test_serve_reads_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SPEC I2: --config names the TOML file; what a flag says beats it."""
    seen = stand_in_server(monkeypatch)
    config = tmp_path / "c.toml"
    config.write_text('model = "a"\nslots = 2\nport = 2\n', encoding="utf-8")
    assert invoke("serve", "--config", str(config), "--slots", "4").exit_code == 0
    engine, server = seen[0]
    assert (engine.models, engine.slots, server.port) == (("a",), 4, 2)


# ---------------------------------------------------------------- models, pull


def test_models_lists_what_is_here_and_what_is_broken(folders: Path) -> None:
    """SPEC I1: the default with its class, size and context; a broken file with the reason."""
    (folders / "models").mkdir()
    (folders / "models" / "junk.gguf").write_bytes(b"not a model")
    write_projector(folders / "models" / "eyes.gguf")
    records = {record["id"]: record for record in json.loads(invoke("models", "--json").stdout)}
    default = records["smollm2-135m-instruct"]
    assert (default["class"], default["n_ctx_train"], default["quantisation"]) == ("decoder", 8192, "Q4_1")
    assert "junk.gguf" in records["junk"]["error"]
    assert (records["eyes"]["class"], records["eyes"]["error"]) == ("projector", None)
    table = invoke("models").stdout
    assert "smollm2-135m-instruct" in table
    assert table.count("broken") == 1
    assert "--mmproj" in table


def test_pull_shows_progress_and_prints_the_path(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    """SPEC L7: the reference and folder reach the hub; stdout is the path alone."""
    asked: list[hub.PullRequest] = []

    def stand_in(request: hub.PullRequest, on_progress: hub.Progress) -> Path:
        asked.append(request)
        on_progress(5, 10, "m.gguf")
        on_progress(10, 10, "m.gguf")
        return request.models_dir / "m.gguf"

    monkeypatch.setattr(hub, "pull", stand_in)
    result = invoke("pull", "owner/repo:Q4_K_M", "--revision", "v1")
    assert (result.exit_code, result.stdout) == (0, f"{folders / 'models' / 'm.gguf'}\n")
    assert (asked[0].reference, asked[0].revision) == ("owner/repo:Q4_K_M", "v1")
    assert "m.gguf" in result.stderr


def test_pull_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L7: offline is an error that says so."""

    def offline(request: hub.PullRequest, on_progress: hub.Progress) -> Path:
        raise DownloadError("the hub cannot be reached; is this machine offline?")

    monkeypatch.setattr(hub, "pull", offline)
    result = invoke("pull", "owner/repo")
    assert result.exit_code == 2
    assert result.stderr == "stoker: the hub cannot be reached; is this machine offline?\n"


# ---------------------------------------------------------------- doctor


def findings(result: Any) -> dict[str, list[dict[str, str]]]:
    """The doctor's findings by subject."""
    by_subject: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.stdout):
        by_subject.setdefault(finding["subject"], []).append(finding)
    return by_subject


def test_doctor_finds_this_machine_in_order() -> None:
    """SPEC R9, M1: build, CPU, memory, cache, models and a real decode in a child process."""
    result = invoke("doctor", "--json")
    found = findings(result)
    assert result.exit_code == 0, result.stdout
    assert set(found) == {
        *("build", "backend", "cpu", "threads", "memory", "pressure", "heat", "cache", "models", "smoke")
    }
    assert "llama-cpp-python" in found["build"][0]["text"]
    assert "available" in found["memory"][0]["text"]
    assert "decodes" in found["smoke"][0]["text"]


def test_doctor_reports_a_build_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC R9: what the child's crash means and what to do; exit code 1 only when nothing works."""
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv")
    safe = invoke("doctor", "--json")
    assert (safe.exit_code, findings(safe)["smoke"][0]["level"]) == (0, "warning")
    assert "rebuild" in findings(safe)["smoke"][0]["remedy"]


def test_doctor_reports_a_build_that_never_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC R9: broken is exit code 1."""
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv-always")
    dead = invoke("doctor", "--json")
    assert (dead.exit_code, findings(dead)["smoke"][0]["level"]) == (1, "broken")


def test_doctor_says_what_to_do_about_each_problem(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written and no model are broken, a bad file is worth a look."""
    (folders / "models").mkdir()
    (folders / "models" / "junk.gguf").write_bytes(b"not a model")
    write_projector(folders / "models" / "eyes.gguf")
    blocked = folders / "file"
    blocked.touch()
    monkeypatch.setenv("STOKER_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setattr("stoker.models.store.embedded_default", lambda: None)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "cannot be written" in result.stdout
    assert "--cache-dir" in result.stdout
    assert "junk" in result.stdout
    assert "eyes" not in result.stdout
    assert "there is no usable model here" in result.stdout
    assert "stoker pull" in result.stdout


def test_doctor_names_who_takes_the_cores() -> None:
    """SPEC M7: how many threads would run, why, and what to do; a program's name, not its arguments."""
    busiest = BusyProcess("cc1plus", 42, 0.97)
    finding = doctor._threads(EngineSettings(threads=2), CoreUse(2, 1.02, busiest))
    assert finding.level == "warning"
    assert "up to 2 (as set), now 1: other programs use 1.0 of 2 cores" in finding.text
    assert "stop cc1plus (process 42, 97% of a core)" in finding.remedy


def test_doctor_finds_free_cores_in_order() -> None:
    """SPEC M7: up to half a core in use is no reason to worry; a machine that shows nothing says so."""
    finding = doctor._threads(EngineSettings(threads=2), CoreUse(2, 0.1, None))
    assert (finding.level, finding.remedy) == ("ok", "")
    assert "now 2" in finding.text
    blind = doctor._threads(EngineSettings(), CoreUse(2, None, None))
    assert blind.level == "ok"
    assert "cannot be seen here" in blind.text


def test_doctor_shows_the_limit_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M1: min(physical, control group, memory_limit)."""
    finding = doctor._memory(EngineSettings(memory_limit=2 * 10**9))
    assert "limit 1.9 GiB" in finding.text
    assert "--memory-limit 1.9 GiB" in finding.text


# ---------------------------------------------------------------- the program


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    """SPEC I1: the commands that exist, at once."""
    heavy = {"fastapi", "huggingface_hub", "llama_cpp", "prompt_toolkit", "uvicorn"}
    code = (
        "import sys\nfrom stoker.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [name for name in sys.modules if name in {heavy!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(
        name in done.stdout
        for name in ("run", "chat", "serve", "models", "pull", "ps", "load", "suspend", "doctor")
    )
    assert done.stdout.endswith("heavy: []\n")


def test_a_command_waits_for_no_other_to_be_imported() -> None:
    """SPEC I1: it took as long to start as all of them."""
    code = (
        "import sys\nfrom stoker.cli.app import app\n"
        "try:\n    app(['ps', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.startswith('stoker.cli.commands.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert imported == {"stoker.cli.commands.ps", "stoker.cli.commands.completion"}


def test_the_version_is_the_packages() -> None:
    """I1: `stoker --version`."""
    assert invoke("--version").stdout.startswith("stoker 0.")


def test_an_unknown_option_is_a_usage_error() -> None:
    """What bad input gets: exit code 2 and the option's name."""
    result = invoke("run", "--nonsense")
    assert result.exit_code == 2
    assert "--nonsense" in result.stderr


# ---------------------------------------------------------------- options of run


def test_run_takes_what_the_library_takes(runtime: RuntimeStandIn, tmp_path: Path) -> None:
    """I1: a system message, stops, sampling and a form are the fields of the library."""
    (tmp_path / "s.json").write_text('{"type": "object"}')
    options = ("--system", "Be brief.", "--stop", "END", "--stop", "\n", "--top-p", "0.5", "--top-k", "3")
    schema = ("--schema", str(tmp_path / "s.json"))
    assert invoke("run", "Hi", *options, "--min-p", "0.2", *schema, runtime=runtime).exit_code == 0
    assert invoke("run", "Hi", "--regex", "[0-9]+", runtime=runtime).exit_code == 0
    first, second = runtime.requests
    assert first.prompt == "[system] Be brief.\n[user] Hi\n"
    assert first.stop == ("END", "\n")
    assert (first.sampling.top_p, first.sampling.top_k, first.sampling.min_p) == (0.5, 3, 0.2)
    assert first.constraint is not None
    assert (first.constraint.kind, json.loads(first.constraint.source)) == ("json_schema", {"type": "object"})
    assert second.constraint is not None
    assert (second.constraint.kind, second.constraint.source) == ("regex", "[0-9]+")


def test_run_prints_one_document_for_programs(runtime: RuntimeStandIn) -> None:
    """I1: the answer with its figures, and nothing else on stdout."""
    found = json.loads(invoke("run", "Hi", "--json", runtime=runtime).stdout)
    assert (found["model"], found["text"], found["finish_reason"]) == ("stand-in", "Hello there.", "stop")
    assert (found["prompt_tokens"], found["completion_tokens"], found["decode_s"]) == (9, 3, 0.5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--raw", "--system", "x"], "--raw has no turns: it takes none of --system, --image, --audio and"),
        (["--raw", "--file", "x"], "--raw has no turns: it takes none of --system, --image, --audio and"),
        (["--top-p", "3"], "--top-p must be between 0 and 1, got 3"),
        (["--seed", "9" * 30], "--seed must fit in 64 bits"),
        (["--schema", "{"], "--schema: it is no JSON: "),
        (["--schema", "none.json"], "No such file or directory: none.json"),
        (["--threads", "banana"], "--threads: "),
    ],
)
def test_wrong_options_of_run_are_named_as_they_are_written(
    arguments: list[str], text: str, runtime: RuntimeStandIn
) -> None:
    """T2: no field of the library, no path in a body, one line."""
    done = invoke("run", "Hi", *arguments, runtime=runtime)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"stoker: {text}")
    assert not runtime.requests


def test_places_in_a_body_are_no_part_of_a_message_here() -> None:
    """T2: `messages.0.content.0` is of HTTP."""
    done = invoke("run", "Hi", "--no-server", "-m", "fake:", "--image", __file__)
    assert done.exit_code == 2
    assert done.stderr.startswith("stoker: the model fake takes text, no pictures")


# ---------------------------------------------------------------- models that are not here


def test_a_repository_that_is_not_here_is_offered(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    """T9: at a terminal a yes downloads and uses it and a no ends with 1; a pipe gets the remedy."""
    asked: list[str] = []

    def stand_in(request: hub.PullRequest, on_progress: hub.Progress) -> Path:
        asked.append(request.reference)
        file = request.models_dir / "owner" / "repo" / "m.gguf"
        file.parent.mkdir(parents=True)
        return write_llama(file)

    monkeypatch.setattr(hub, "pull", stand_in)
    refused = invoke("run", "Hi", "-m", "owner/repo")
    assert refused.exit_code == 2
    assert refused.stderr == "stoker: no model 'owner/repo' here; to download it: stoker pull owner/repo\n"
    assert asked == []
    monkeypatch.setattr(download, "_is_somebody_there", lambda: True)
    assert invoke("run", "Hi", "-m", "owner/repo", stdin="n\n").exit_code == 1
    done = invoke("run", "Hi", "-n", "2", "-m", "owner/repo", stdin="y\n")
    assert (done.exit_code, asked) == (0, ["owner/repo"]), done.output
    again = invoke("run", "Hi", "-n", "2", "-m", "owner/repo")
    assert (again.exit_code, asked) == (0, ["owner/repo"]), again.output


def test_run_at_a_terminal_without_a_prompt_says_what_to_do() -> None:
    """It answers no question that nobody asked."""
    with Terminal("stoker", "run") as terminal:
        assert terminal.ended() == 2
        assert "there is no prompt: give one" in terminal.text
