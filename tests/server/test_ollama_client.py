"""Ollama's API through its official client, unchanged; and what an editor asks before it uses it."""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import ollama
import pytest
import stand_in
from stand_in import FINISHED, INFO, StandInRuntime, delta

from pictures import plain
from stoker import Runtime
from stoker.errors import ModelNotFoundError
from stoker.images.intake import Intake
from stoker.images.limits import ImageLimits
from stoker.ipc.request import IMAGE_MARKER, FinishReason
from stoker.server.ollama.options import closed

QWEN = "{{ tools }}<tool_call></tool_call></think>"
CALLS = (
    '<think>Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {\r\n"a": {"b": [2]}\n}}\n</tool_call>'
)
SPEC = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "fake", "messages": HELLO, "options": {"num_predict": 8, "temperature": 0}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
COUNTS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
N_CTX = 1024


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def make_runtime() -> Runtime:
    """A decoder and an encoder of the fake backend."""
    models = ("fake:eog_period=0", "fake:encoder=1,id=vectors")
    return Runtime(
        None, models=models, isolation="thread", slots=4, ctx_size=N_CTX, states_dir="no-such-folder"
    )


@pytest.fixture(scope="module")
def served(_module_servers):
    """A server with both."""
    server = _module_servers(make_runtime)
    server.ready.result(60.0)
    return server


@pytest.fixture
def client_of():
    """Official clients of servers, closed with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda server, **how: stack.enter_context(ollama.Client(host=server.url, **how))


@pytest.fixture
def client(served, client_of):
    """The official client of it."""
    return client_of(served)


@pytest.fixture
def web(served):
    """A plain client of it."""
    with httpx.Client(base_url=served.url, timeout=60.0) as found:
        yield found


class SeeingRuntime(StandInRuntime):
    """The scripted runtime with a model that reads images, calls tools and reasons."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.images = Intake(ImageLimits(edge_px=100, max_images=3))

    def resolve(self, model: str | None) -> Any:
        """The same model, seeing."""
        return msgspec.structs.replace(super().resolve(model), has_vision=True, chat_template=QWEN)

    @property
    def models(self) -> Any:
        """That model."""
        return [self.resolve(None)] if self.is_ready else []


@pytest.fixture(scope="module")
def able(_module_servers):
    """A server whose model does all that."""
    server = _module_servers(SeeingRuntime)
    server.ready.result(60.0)
    return server


@pytest.fixture
def able_client(able, client_of):
    """The official client of it."""
    yield client_of(able)
    able.call(able.runtime.reset)


def says(server, text, reason=FinishReason.STOP):
    """The next answer, a character a delta."""
    steps = [*(delta(char) for char in text), delta("", finish_reason=reason), FINISHED]
    server.call(lambda: server.runtime.scripts.append(steps))


def asked(server):
    """The last request."""
    return server.call(lambda: server.runtime.requests[-1])


# ------------------------------------------------------------ chat


def test_a_chat_is_the_same_streamed_and_whole(client):
    """N1: the same text at temperature 0, and both ends have counts and times in nanoseconds."""
    whole = client.chat(**CHAT)
    parts = list(client.chat(**CHAT, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content != ""
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for end in (whole, parts[-1]):
        assert (end.done_reason, end.eval_count, end.model) == ("length", 8, "fake")
        assert end.prompt_eval_count > 0
        assert all(getattr(end, name) > 0 for name in COUNTS)
        assert datetime.fromisoformat(end.created_at).tzinfo is UTC or end.created_at.endswith("Z")
    assert parts[0].done_reason is None


def test_lines_are_json_with_nothing_between_them(web):
    """N1: no comments, no `data:`; it streams unless told not to."""
    answer = web.post("/api/chat", json=CHAT)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["model"] == "fake" for line in answer.text.splitlines())
    whole = web.post("/api/chat", json={**CHAT, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["role"] == "assistant"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_calls_are_whole_and_their_arguments_are_objects(able, able_client, is_streamed):
    """N2: reasoning and text beside them; the reason is "stop", as Ollama's is."""
    says(able, CALLS)
    answer = able_client.chat("stand-in", HELLO, tools=[SPEC, add], stream=is_streamed)
    parts = list(answer) if is_streamed else [answer]
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("f", {"a": 1}), ("f", {"a": {"b": [2]}})]
    assert "".join(part.message.content or "" for part in parts) == "So:"
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert parts[-1].done_reason == "stop"
    assert '"add"' in asked(able).prompt or "'add'" in asked(able).prompt


def test_results_belong_to_the_calls_before_them(able, able_client):
    """N2: by the tool's name, else in order; the history has arguments as objects and no ids."""
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    broken = {
        "model": "stand-in",
        "messages": [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"id": 1}, {}, {"id": "x", "function": {}}]},
            *HELLO,
        ],
    }
    assert httpx.post(f"{able.url}/api/chat", json=broken).status_code == 200
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "of g", "tool_name": "g"},
        {"role": "tool", "content": "of f"},
        {"role": "user", "content": "So?"},
    ]
    says(able, "Fine.")
    assert able_client.chat("stand-in", history, tools=[SPEC]).message.content == "Fine."
    prompt = asked(able).prompt
    assert prompt.index("of g") < prompt.index("of f")


def test_a_call_that_the_text_ends_in_is_text(able, able_client):
    """N2: half an object is no object."""
    says(able, '<tool_call>\n{"name": "f", "argu', FinishReason.LENGTH)
    answer = able_client.chat("stand-in", HELLO, tools=[SPEC])
    assert answer.message.tool_calls is None
    assert (answer.done_reason, '"argu' in answer.message.content) == ("length", True)


def test_images_for_a_model_that_sees_nothing_are_refused_by_their_own_name(client):
    """N1, N3: in the words of the body that was sent."""
    turn = {"role": "user", "content": "What?", "images": [plain()]}
    with pytest.raises(ollama.ResponseError, match=r"^messages\.1\.images\.0: the model fake takes text"):
        client.chat("fake", [*HELLO, turn])
    with pytest.raises(ollama.ResponseError, match=r"^images\.0: the model fake takes text") as caught:
        client.generate("fake", "What?", images=[plain(), plain()])
    assert caught.value.status_code == 400


def test_images_come_as_base64_or_bytes(able, able_client):
    """N1: in chat and in generate, raw too."""
    red = plain(colour=(255, 0, 0))
    turn = {"role": "user", "content": "What?", "images": [red, base64.b64encode(red).decode()]}
    able_client.chat("stand-in", [turn])
    assert (len(asked(able).pictures), asked(able).prompt.count(IMAGE_MARKER)) == (2, 2)
    able_client.generate("stand-in", "What?", images=[red])
    assert (len(asked(able).pictures), asked(able).is_chat) == (1, True)
    able_client.generate("stand-in", "What?", images=[red], raw=True)
    assert (asked(able).prompt, asked(able).is_chat) == (f"{IMAGE_MARKER}What?", False)
    with pytest.raises(ollama.ResponseError, match=r"images\.0.*no image|images\.0") as caught:
        able_client.generate("stand-in", "What?", images=[base64.b64encode(b"nothing").decode()])
    assert caught.value.status_code == 400


def test_thinking_is_told_to_the_template(able, able_client):
    """N1: on, off or a level."""
    for think, shown in (
        (True, "enable_thinking=True"),
        (False, "enable_thinking=False"),
        ("low", "effort=low"),
    ):
        able_client.chat("stand-in", HELLO, think=think)
        assert shown in asked(able).prompt
        able_client.generate("stand-in", "Hi", think=think)
        assert shown in asked(able).prompt
    says(able, "<think>Hm.</think>\n\nSo.")
    answer = able_client.generate("stand-in", "Hi", think=True)
    assert (answer.thinking, answer.response) == ("Hm.", "So.")


def test_a_format_holds(client):
    """N1: JSON, or a schema, in all of its spellings."""
    assert json.loads(client.chat("fake", HELLO, format=SCHEMA).message.content) == {"a": 7}
    assert json.loads(client.generate("fake", "Hi", format=SCHEMA).response) == {"a": 7}
    assert json.loads(client.generate("fake", "Hi", format=SCHEMA, raw=True).response) == {"a": 7}
    with pytest.raises(ollama.ResponseError, match="format"):
        client._request(dict, "POST", "/api/chat", json={**CHAT, "stream": False, "format": "xml"})


def test_a_schema_is_closed_as_ollamas_grammars_are():
    """N1: a property may be called like a word of JSON Schema; what says that it is open stays so."""
    named = {
        "type": "object",
        "properties": {"properties": {"type": "string"}, "enum": {"$ref": "#"}},
    }
    opened = {"type": "object", "properties": {}, "additionalProperties": True}
    given = {"anyOf": [named, opened], "$defs": {"x": named}, "allOf": [named], "default": named}
    shut = {**named, "additionalProperties": False}
    assert closed(given) == {
        "anyOf": [shut, opened],
        "$defs": {"x": shut},
        "allOf": [named],
        "default": named,
    }


def test_log_probabilities_come_with_the_text(client):
    """N1: of each token, with alternatives."""
    answer = client.chat(**CHAT, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 8
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in answer.logprobs)
    parts = list(client.generate("fake", "Hi", logprobs=True, stream=True, options={"num_predict": 3}))
    assert sum(len(part.logprobs or ()) for part in parts) == 3


# ------------------------------------------------------------ generate


def test_a_prompt_is_laid_out_unless_it_is_raw(able, able_client):
    """N1: with the system prompt before it; raw text is sent as it is."""
    able_client.generate("stand-in", "Hi", system="Be brief.")
    assert "system: Be brief.\nuser: Hi" in asked(able).prompt
    able_client.generate("stand-in", "Once", raw=True, options={"num_predict": 3, "stop": ["w2"]})
    request = asked(able)
    assert (request.prompt, request.is_chat, request.max_tokens, request.stop) == ("Once", False, 3, ("w2",))
    answer = "".join(
        part.response for part in able_client.generate("stand-in", "Once", raw=True, stream=True)
    )
    assert answer == able_client.generate("stand-in", "Once", raw=True).response == "w0 w1 w2 w3 "


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"context": [1, 2]}, "context is not taken.*/api/chat"),
        ({"template": "{{ .Prompt }}"}, "template is not taken"),
        ({"suffix": "end"}, "suffix.*does not support insert"),
        ({"raw": True, "system": "x"}, "system cannot be used with raw"),
        ({"options": {"temperature": "hot"}}, r"options\.temperature"),
        ({"options": {"num_ctx": "2k"}}, r"options\.num_ctx"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(client, given, named):
    """N3: with 400 and `{"error": "..."}`."""
    with pytest.raises(ollama.ResponseError, match=named) as caught:
        client.generate("fake", "Hi", **given)
    assert caught.value.status_code == 400


def test_text_is_filled_in_with_the_models_own_tokens(scripted, monkeypatch, client_of):
    """N1: `suffix` becomes the prompt that a model of that family was trained with."""

    async def tokenize(text, model="default", **_):
        return ([1] if text.startswith("<|fim_") else [1, 2]), []

    monkeypatch.setattr(scripted.runtime, "tokenize", tokenize)
    client_of(scripted).generate("stand-in", "def f(", suffix="return 1")
    assert asked(scripted).prompt == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"


# ------------------------------------------------------------ options


def test_options_are_our_samplers(scripted):
    """N1: whole numbers may have a point; a seed of -1 is any; those of a load are named and do nothing."""
    options = {"temperature": 0.5, "top_k": 7.0, "seed": 3, "num_gpu": 99, "mirostat": 0, "num_predict": 5.0}
    options |= {"repeat_penalty": 1.25, "min_p": 0.1, "use_mmap": True}
    body = {"model": "stand-in", "messages": HELLO, "options": options, "stream": False, "shift": True}
    answer = httpx.post(f"{scripted.url}/api/chat", json=body)
    assert answer.headers["x-stoker-ignored"] == "options.num_gpu, options.use_mmap"
    request = asked(scripted)
    found = request.sampling
    assert (found.temperature, found.top_k, found.seed, found.repeat_penalty) == (0.5, 7, 3, 1.25)
    assert (request.max_tokens, request.context_shift) == (5, True)
    options = {"seed": -1, "num_predict": -1}
    httpx.post(f"{scripted.url}/api/generate", json={"model": "stand-in", "prompt": "Hi", "options": options})
    assert (asked(scripted).sampling.seed, asked(scripted).max_tokens) == (None, INFO.n_ctx)


def test_the_class_comes_by_header(scripted):
    """N1, Q1: as on every other route, vectors among them."""
    for path, body in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hi"})):
        headers = {"X-Stoker-Priority": "background"}
        httpx.post(f"{scripted.url}/api/{path}", json={"model": "stand-in", **body}, headers=headers)
        assert asked(scripted).priority == "background"


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [(5, 5), ("5m", 300), ("1h30m", 5400), (-1, -1), ("-1m", -60), ("0", 0), (0, 0), ("24h0m0s", 86400)],
)
def test_keep_alive_is_a_number_or_a_time(scripted, keep_alive, seconds, client_of):
    """N1: as Go writes times."""
    client_of(scripted).chat("stand-in", HELLO, keep_alive=keep_alive)
    assert asked(scripted).keep_alive_s == seconds


def test_a_context_is_a_bound_of_its_request(client, served):
    """N4: nothing is reloaded; prompt and answer stay within it, a prompt over it is refused with numbers."""
    before = served.call(lambda: [info.n_ctx for info in served.runtime.models])
    answer = client.chat("fake", HELLO, options={"num_ctx": 64, "num_predict": 500})
    assert answer.prompt_eval_count + answer.eval_count == 64
    long = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(ollama.ResponseError, match=r"maximum context length is 64 tokens.* has 1\d\d tokens"):
        client.chat("fake", long, options={"num_ctx": 64})
    with pytest.raises(ollama.ResponseError, match=r"Shorten it, or raise options\.num_ctx"):
        client.generate("fake", "x" * 100, options={"num_ctx": 64})
    with pytest.raises(ollama.ResponseError, match=f"maximum context length is {N_CTX} tokens"):
        client.chat("fake", [{"role": "user", "content": "x" * 4000}])
    assert client.chat("fake", long, options={"num_ctx": 10**6, "num_predict": 1}).eval_count == 1
    assert served.call(lambda: [info.n_ctx for info in served.runtime.models]) == before


def test_a_conversation_is_cut_only_where_that_is_asked_for(served, web):
    """N4: the oldest exchanges go, system turns and the last one stay; a prompt loses its beginning."""
    turns = [{"role": "system", "content": "Sys."}]
    for number in range(20):
        turns += [{"role": "user", "content": f"q{number} " * 9}, {"role": "assistant", "content": "a" * 9}]
    turns.append({"role": "user", "content": "last"})
    body = {"model": "fake", "messages": turns, "stream": False, "options": {"num_predict": 4}}
    refused = web.post("/api/chat", json=body)
    assert (refused.status_code, "maximum context length" in refused.json()["error"]) == (400, True)
    assert web.post("/api/chat", json={**body, "truncate": False}).status_code == 400
    cut = web.post("/api/chat", json={**body, "truncate": True}).json()
    assert N_CTX // 2 < cut["prompt_eval_count"] <= N_CTX - 4
    assert cut["eval_count"] == 4
    hopeless = {**body, "truncate": True, "messages": [{"role": "user", "content": "x" * 4000}]}
    assert web.post("/api/chat", json=hopeless).status_code == 400
    prompt = {"model": "fake", "prompt": "x" * 4000, "truncate": True, "stream": False}
    for raw in (False, True):
        done = web.post("/api/generate", json={**prompt, "raw": raw, "options": {"num_predict": 4}}).json()
        assert (done["prompt_eval_count"], done["eval_count"]) == (N_CTX - 4, 4)


# ------------------------------------------------------------ vectors


def test_texts_are_embedded(client):
    """N5: one vector a text, of length 1; the older route has that of one text."""
    found = client.embed("vectors", ["one", "two"])
    assert len(found.embeddings) == 2
    assert sum(number**2 for number in found.embeddings[0]) == pytest.approx(1.0, abs=1e-5)
    assert found.embeddings[0] == client.embed("vectors", "one").embeddings[0]
    assert len(client.embed("vectors", "one", dimensions=2).embeddings[0]) == 2
    assert len(client.embeddings("vectors", "one").embedding) == len(found.embeddings[0])
    assert found.prompt_eval_count > 0


def test_a_long_text_is_cut_only_where_that_is_asked_for(client):
    """N5: else it is refused, with both numbers."""
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("vectors", "x" * 9000)
    assert len(client.embed("vectors", ["x" * 9000, "one"], truncate=True).embeddings) == 2
    with pytest.raises(ollama.ResponseError, match=r"^fake is .*: this model does not support") as caught:
        client.embed("fake", "one")
    assert caught.value.status_code == 400


# ------------------------------------------------------------ models


def test_models_are_listed_shown_and_seen_in_memory(client):
    """N6: by names with a tag; what clients read is there."""
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {"fake:latest", "vectors:latest"}
    assert all(len(model.digest) == 64 and model.modified_at for model in listed.values())
    shown = client.show("fake")
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == N_CTX
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.details.family == architecture
    assert client.show("vectors:latest").capabilities == ["embedding"]
    client.chat("fake", HELLO, options={"num_predict": 1})
    running = {model.name: model for model in client.ps().models}
    assert running["fake:latest"].expires_at > datetime.now(UTC)
    assert running["fake:latest"].context_length == N_CTX


@pytest.mark.parametrize("name", ["fake", "fake:latest", "FAKE", "default", "Fake:latest"])
def test_latest_is_the_name_itself(client, name):
    """N6: and upper and lower case are one; an answer says the name that was used."""
    answer = client.chat(name, HELLO, options={"num_predict": 1})
    assert answer.model == name


def test_a_tag_may_be_part_of_a_name(start_server, client_of):
    """N6: such a model is found by its whole name, and listed by it."""
    server = start_server(lambda: Runtime("fake:id=a:7b,eog_period=0", isolation="thread"))
    server.ready.result(60)
    client = client_of(server)
    assert [model.model for model in client.list().models] == ["a:7b"]
    assert client.generate("a:7b", "Hi", options={"num_predict": 1}).done
    with pytest.raises(ollama.ResponseError, match="model 'a' not found"):
        client.generate("a", "Hi")


def test_an_unknown_model_is_not_found_in_ollamas_words(client):
    """N3: 404, on every route."""
    for call in (
        lambda: client.chat("nobody", HELLO),
        lambda: list(client.chat("nobody", HELLO, stream=True)),
        lambda: client.generate("nobody:7b", "Hi"),
        lambda: client.embed("nobody", "Hi"),
        lambda: client.show("nobody"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"model 'nobody(:7b)?' not found") as caught:
            call()
        assert caught.value.status_code == 404


def test_an_error_within_a_stream_is_a_line(scripted, client_of):
    """N3: what was said before it stays."""
    steps = [delta("So"), ModelNotFoundError("gone")]
    scripted.call(lambda: scripted.runtime.scripts.append(steps))
    stream = client_of(scripted).chat("stand-in", HELLO, stream=True)
    assert next(stream).message.content == "So"
    with pytest.raises(ollama.ResponseError, match="gone"):
        next(stream)


def test_silence_is_a_line_that_adds_nothing(scripted, client_of):
    """N1: proxies and clients see that it lives; the text is as it was."""
    steps = [delta("So"), stand_in.HOLD, delta(".", finish_reason=FinishReason.STOP), FINISHED]
    scripted.call(lambda: scripted.runtime.scripts.append(steps))
    stream = client_of(scripted).chat("stand-in", HELLO, stream=True)
    assert next(stream).message.content == "So"
    beat = next(stream)
    assert (beat.message.content, beat.done) == ("", False)
    scripted.call(scripted.runtime.release)
    assert "".join(part.message.content for part in stream) == "."


def test_without_a_prompt_a_model_is_loaded_or_unloaded(client, web):
    """N7: as clients do it ahead of time and at their end."""
    done = client.generate("fake", keep_alive=0)
    assert (done.done, done.done_reason, done.response) == (True, "unload", "")
    assert "fake:latest" not in {model.name for model in client.ps().models}
    assert client.chat("fake", keep_alive="10m").done_reason == "load"
    assert "fake:latest" in {model.name for model in client.ps().models}
    assert [part.done_reason for part in client.generate("fake", stream=True)] == ["load"]


def test_who_may_not_operate_the_server_unloads_nothing(start_server, tmp_path, client_of):
    """N7, S4: nor pulls nor deletes; loading a served model is what any request does."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    server = start_server(api_key_file=keys)
    server.ready.result(60)
    client = client_of(server, headers={"Authorization": "Bearer secret"})
    for call in (
        lambda: client.generate("stand-in", keep_alive=0),
        lambda: client.pull("acme/tiny-GGUF"),
        lambda: client.delete("stand-in"),
    ):
        with pytest.raises(ollama.ResponseError, match="operators") as caught:
            call()
        assert caught.value.status_code == 403
    assert client.generate("stand-in", keep_alive="5m").done_reason == "load"
    assert server.call(lambda: server.runtime.calls[-1][:3]) == ("load", "stand-in", None)
    with pytest.raises(ollama.ResponseError, match="API key") as caught:
        client_of(server).list()
    assert caught.value.status_code == 401


def test_what_is_not_meant_here_says_so(client):
    """N3: 501, and why."""
    for call in (lambda: client.copy("fake", "other"), lambda: client.create("x", from_="fake")):
        with pytest.raises(ollama.ResponseError, match="here") as caught:
            call()
        assert caught.value.status_code == 501


# ------------------------------------------------------------ an editor

PROBES = [
    ("HEAD", "/", None, lambda answer: answer.text == ""),
    ("GET", "/", None, lambda answer: answer.text == "Ollama is running"),
    ("HEAD", "/api/version", None, lambda answer: answer.text == ""),
    (
        "GET",
        "/api/version",
        None,
        lambda answer: [int(part) for part in answer.json()["version"].split(".")] >= [0, 6, 4],
    ),
    ("GET", "/api/tags", None, lambda answer: answer.json()["models"][0]["model"] == "fake:latest"),
    (
        "POST",
        "/api/show",
        {"model": "fake:latest"},
        lambda answer: "tools" in answer.json()["capabilities"] and answer.json()["model_info"],
    ),
    ("POST", "/api/show", {"name": "fake"}, lambda answer: answer.json()["details"]["format"] == "gguf"),
    (
        "POST",
        "/api/chat",
        {
            "model": "fake:latest",
            "messages": HELLO,
            "tools": [SPEC],
            "options": {"num_predict": 4, "num_ctx": 1000},
        },
        lambda answer: json.loads(answer.text.splitlines()[-1])["done_reason"] == "length",
    ),
]
"""What an editor sent that found Ollama at its port, chose a model and asked it something."""


def test_what_an_editor_asks_is_answered(web):
    """N6: the recorded sequence, in its order."""
    for method, path, body, is_right in PROBES:
        answer = web.request(method, path, json=body)
        assert (path, answer.status_code) == (path, 200)
        assert is_right(answer), (method, path, answer.text)


def test_a_browser_is_told_who_runs(web):
    """N6: whoever asks for a page reads no other program's name."""
    page = web.get("/", headers={"Accept": "text/html,*/*"}, follow_redirects=True)
    assert "<title>Stoker</title>" in page.text
