"""`stoker config`: every mistake of a settings file with its line, and where each setting comes from."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app

KEYS = """\
[keys.a]
hash = "secret"
classes = ["fast"]

[keys.b]
models = 5
"""

WRONG = """\
slotz = 3
port = "high"

[models.chat]
file = "no-such-file.gguf"
ctx_sise = 5
slots = 0

[keys.a]
hash = "secret"
"""


def run(*words):
    """The result of a command."""
    return CliRunner().invoke(app, ["config", *map(str, words)])


def test_every_mistake_is_told_with_its_line(tmp_path):
    """G8: not the first alone; the exit code is 1."""
    file = tmp_path / "stoker.toml"
    file.write_text(WRONG, encoding="utf-8")
    told = run("check", file)
    lines = [line.removeprefix(f"{file}:").split(":")[:2] for line in told.output.splitlines()]
    assert lines == [
        ["1", " slotz"],
        ["2", " port"],
        ["6", " models.chat.ctx_sise"],
        ["7", " models.chat.slots"],
        ["10", " keys.a.hash"],
        ["5", " models.chat.file"],
    ]
    assert "did you mean ctx_size" in told.output
    assert told.exit_code == 1


def test_a_key_with_a_wrong_hash_or_none_has_its_other_mistakes_told_too(tmp_path):
    """G8: each at its line."""
    file = tmp_path / "stoker.toml"
    file.write_text(KEYS, encoding="utf-8")
    lines = [line.removeprefix(f"{file}:").split(":")[:2] for line in run("check", file).output.splitlines()]
    assert lines == [
        ["2", " keys.a.hash"],
        ["3", " keys.a.classes"],
        ["6", " keys.b.models"],
        ["5", " keys.b.hash"],
    ]


def test_what_a_right_file_leads_to_is_checked_too(tmp_path):
    """G8: a model that is not there, at the line of its file; a file without mistakes ends with 0."""
    file = tmp_path / "stoker.toml"
    file.write_text('[models.a]\nslots = 2\nfile = "none.gguf"\n', encoding="utf-8")
    assert f"{file}:3: models.a.file: no such model file" in run("check", file).output
    file.write_text("slots = \n", encoding="utf-8")
    assert f"{file}:1: not valid TOML" in run("check", file).output
    file.write_text('[models.a]\nfile = "fake:"\n', encoding="utf-8")
    told = run("check", file)
    assert (told.exit_code, told.output) == (0, f"{file}: nothing is wrong\n")


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        ('[models.a]\nfile = "fake:"\ntool_format = "hermez"', "3: models.a.tool_format", "hermes, hunyuan"),
        (
            '[models.a]\nfile = "fake:"\nsampling = { top_p = 7, min_p = "x", temprature = 1 }',
            "3: models.a.sampling",
            "top_p must be between 0 and 1, got 7; min_p: Expected `float`, got `str`; there is no sampler",
        ),
        ('models = ["fake:"]\napi_key_file = "none"', "2: api_key_file", "cannot read the API key file"),
        ('models = ["fake:"]\nadmin_key_file = "none"', "2: admin_key_file", "cannot read the API key file"),
        ('models = ["fake:"]\nhost = "0.0.0.0"', "2: host", "other machines reach this server"),
        ('[model.a]\nfile = "fake:"', "1: model", "tables of models are written [models.NAME]"),
        ("model = 5", "1: model", "5 is no list"),
        ('models = ["fake:"]\n[models.a]\nslots = 1', "2", "`models = ...` and tables [models.NAME]"),
        ('[placement.b]\nmmap = true\n[models.a]\nfile = "fake:"', "1: placement", "no model 'b' is served"),
        (
            '[models.a]\nfile = "fake:"\ngpu_layers = -4',
            "3: models.a.gpu_layers",
            "auto nor all nor between 0",
        ),
        (
            'chat_template = "x.jinja"\n[models.a]\nfile = "fake:"',
            "1: chat_template",
            ": x.jinja: No such file or directory",
        ),
        (
            f'[models.a]\nfile = "fake:"\n[keys.k]\nhash = "{"0" * 64}"\nmodels = ["a", "b", "own/er"]',
            "5: keys.k.models",
            "no model 'b' is served; there are: a",
        ),
        ('[models.a]\nfile = "fake:"\nfallback = "/nope"', "3: models.a.fallback", "model file: /nope"),
        ('[models.a]\nfile = "fake:"\nbackend = "LLAMA"', "3: models.a.backend", "there is no 'LLAMA'"),
        ('models = ["fake:"]\nhost = "a b"', "2: host", "there is no address 'a b'"),
        ('models = ["fake:"]\nollama_port = 8686', "2: ollama_port", "8686 is that of the server itself"),
    ],
)
def test_what_serve_would_refuse_is_told_at_its_line(tmp_path, text, place, told):
    """G8: formats of tool calls, every sampler, files of keys, addresses."""
    file = tmp_path / "stoker.toml"
    file.write_text(text, encoding="utf-8")
    result = run("check", file)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"{file}:{place}: ")
    assert told in line


HASH = "0" * 64
STAGES = [
    (
        f"""slots = 0
            [models.a]
            file = "/nope.gguf"
            [keys.k]
            hash = "{HASH}"
            models = ["nope", "a"]
        """,
        ["1: slots", "3: models.a.file", "6: keys.k.models"],
    ),
    (
        """[models.a]
            file = "fake:"
            aliases = ["x"]
            [models.b]
            file = "fake:"
            aliases = ["x"]
            draft_model = "nope"
            [models.c]
            file = "nope.gguf"
            aliases = ["x"]
        """,
        ["7: models.b.draft_model", "9: models.c.file", "6: models.b.aliases", "10: models.c.aliases"],
    ),
    (
        """[models.a]
            file = "fake:"
            lora = ["q", "r"]
            chat_template = "nofile"
            mmproj = "nofile"
        """,
        ["4: models.a.chat_template", "3: models.a.lora", "3: models.a.lora", "5: models.a.mmproj"],
    ),
    (
        """[models.a]
            file = "nope.gguf"
            lora = ["q"]
            chat_template = "nofile"
            mmproj = "nofile"
        """,
        ["2: models.a.file", "4: models.a.chat_template", "3: models.a.lora", "5: models.a.mmproj"],
    ),
    (
        """draft_model = "nope"
            chat_template = ["nofile", "b=nofile"]
            lora = ["q", "r"]
            port = 70000
            admin_key_file = "nofile"
            [models."a.b"]
            file = "fake:"
            ctx-size = -1
        """,
        [
            *("4: port", "8: models.a.b.ctx_size", "2: chat_template", "2: chat_template"),
            *("1: draft_model", "3: lora", "3: lora", "5: admin_key_file"),
        ],
    ),
    (
        """[models.a]
            file = "fake:"
            lora = ["q=fake:x", "q=fake:y"]
        """,
        ["3: models.a.lora"],
    ),
    (
        f"""models = ["fake:", "nope"]
            [keys.x]
            hash = "{HASH}"
            [keys.y]
            hash = "sha256:{HASH}"
            models = ["fake", "nope", "other"]
            [keys.z]
            models = ["others"]
        """,
        ["7: keys.z.hash", "5: keys.y.hash", "1: models", "6: keys.y.models", "8: keys.z.models"],
    ),
]


@pytest.mark.parametrize(("text", "places"), STAGES)
def test_no_mistake_hides_another(tmp_path, text, places):
    """G8: neither in one table nor between models, keys and what stands beside them."""
    file = tmp_path / "stoker.toml"
    file.write_text(text, encoding="utf-8")
    lines = [line.removeprefix(f"{file}:").split(": ", 2) for line in run("check", file).output.splitlines()]
    assert [": ".join(line[:2]) for line in lines] == places
    assert not [line for line in lines if line[1] in line[2]]  # the place is told once


def test_a_key_needs_a_name():
    """G8: the argument is named, not the table that it would be."""
    told = run("key", "")
    assert (told.exit_code, told.output) == (
        2,
        "stoker: NAME: '' is no name: printable, 1 to 128 characters\n",
    )


def test_each_setting_is_shown_with_where_it_comes_from(tmp_path, monkeypatch):
    """G8: a table's own, what holds for all, the environment, defaults."""
    file = tmp_path / "stoker.toml"
    file.write_text('slots = 3\n[models.a]\nfile = "fake:"\nctx_size = 64\n', encoding="utf-8")
    monkeypatch.setenv("STOKER_PORT", "99")
    shown = run("show", "--resolved", "--config", file).output.splitlines()
    assert f"slots = 3  # slots in {file}" in shown
    assert "port = 99  # STOKER_PORT" in shown
    assert "ctx_size = 64  # models.a" in shown
    assert f"slots = 3  # for all: slots in {file}" in shown
    assert "max_queue = 512  # default" in shown
    assert not any("default" in line for line in run("show", "--config", file).output.splitlines())


DRAFTED = """\
draft_model = "fake:draft"

[models.first]
file = "fake:"

[models.second]
file = "fake:"

[models.third]
file = "fake:"
draft_model = "fake:own"
"""


def drafts_of(path):
    """The line of each section that says which model guesses."""
    shown = run("show", "--resolved", "--config", path).output
    return [line for line in shown.splitlines() if line.startswith("draft_model")]


def test_the_draft_model_of_the_settings_is_that_of_the_default_model(tmp_path, monkeypatch):
    """G6: what is shown is what each model gets; a table's own comes before it."""
    file = tmp_path / "stoker.toml"
    file.write_text(DRAFTED, encoding="utf-8")
    given = 'draft_model = "fake:draft"'
    assert drafts_of(file) == [
        f"{given}  # draft_model in {file}",
        f"{given}  # for all: draft_model in {file}",
        "draft_model = null  # default",
        'draft_model = "fake:own"  # models.third',
    ]
    monkeypatch.setenv("STOKER_MODELS", "third,second")
    assert drafts_of(file)[1:] == [
        "draft_model = null  # default",
        "draft_model = null  # default",
        'draft_model = "fake:own"  # models.third',
    ]


def test_what_names_single_models_is_checked_once_beside_the_tables(tmp_path):
    """G8: at its own line and not at each table; what names one table is no mistake of another."""
    file = tmp_path / "stoker.toml"
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    rest = DRAFTED.replace("fake:draft", "none.gguf")
    file.write_text(f'chat_template = ["second={template}"]\n{rest}', encoding="utf-8")
    told = run("check", file).output.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"{file}:2: draft_model: no such model file")


TWINS = """\
backend = "metal"
[models.a]
file = "fake:a"
[models.b]
file = "fake:b"
fallback = "gone.gguf"
[models.c]
file = "fake:c"
fallback = "broken.gguf"
[models.d]
file = "broken.gguf"
fallback = "fake:d"
[models.e]
file = "fake:e"
fallback = "broken.gguf"
backend = "fake"
[models.f]
file = "broken.gguf"
fallback = "gone.gguf"
[models.g]
file = "fake:g"
fallback = "fake:h"
"""


def test_a_backend_that_there_is_none_of_is_told_once_and_a_wrong_fallback_at_its_line(tmp_path, monkeypatch):
    """G8, K8: that a model is served without them does not hide what is wrong with them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    file = tmp_path / "stoker.toml"
    file.write_text(TWINS, encoding="utf-8")
    told = [line.removeprefix(f"{file}:").split(": ", 2) for line in run("check", file).output.splitlines()]
    assert [place for *place, _ in told] == [
        ["1", "backend"],
        ["6", "models.b.fallback"],
        ["9", "models.c.fallback"],
        ["11", "models.d.file"],
        ["15", "models.e.fallback"],
        ["18", "models.f.file"],
        ["19", "models.f.fallback"],
    ]
    assert "no such model file" in told[1][2]
    assert all("broken.gguf" in text for *_, text in (told[2], told[3], told[5]))
