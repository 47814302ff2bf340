"""`stoker chat` beside a server: it asks that one, shows its place in the line, changes who answers."""

import json
import threading

import httpx
import pytest

from stoker.runtime import Runtime
from terminal import Terminal


@pytest.fixture
def server(start_server, tmp_path):
    """A server with one slot, whose first model says what is scripted."""
    script = tmp_path / "script"
    script.write_text("From **the server**.\fAgain.", encoding="utf-8")
    models = (f"fake:id=talker,script={script}", "fake:id=other,eog_period=0,step_delay_s=0.02")
    served = start_server(lambda: Runtime(models=models, isolation="thread", slots=1), keepalive_s=0.05)
    served.ready.result(60)
    return served


@pytest.fixture
def chat(server, tmp_path):
    """A function that starts a chat with it."""

    def start(*options):
        env = {"XDG_STATE_HOME": str(tmp_path / "state"), "STOKER_RUN_DIR": str(tmp_path / "run")}
        return Terminal("stoker", "chat", "--url", server.url, "-n", "40", *options, columns=100, env=env)

    return start


def is_idle_after(text):
    """A condition: that is shown, and below it the prompt stands empty."""
    return lambda seen: text in seen.text and seen.lines[-1] == ">"


@pytest.mark.long
def test_a_chat_asks_the_server_and_another_of_its_models(chat, server):
    """I16, I11: no model is loaded here; a command lists and changes those of the server."""
    with chat() as terminal:
        terminal.until(is_idle_after(f"asking talker at {server.url}"))
        terminal.send("Hi\r")
        terminal.until(is_idle_after("From the"))
        terminal.send("/model\r")
        terminal.until(is_idle_after("* talker\n  other\n"))
        terminal.send("/model other\r")
        terminal.until(is_idle_after("other answers from now on"))
        terminal.send("Again\r/stats\r")
        terminal.until(is_idle_after("other: 2 answers: "))
        assert "warning:" not in terminal.text, "comments of the stream of events are no events"


@pytest.mark.long
def test_a_place_in_the_line_is_shown_while_it_lasts(chat, server):
    """I16, Q14: what it waits for stands in one line, which the answer takes the place of."""
    with chat("-m", "other") as terminal:
        terminal.until(is_idle_after("asking other"))
        body = {"model": "other", "prompt": "long", "max_tokens": 400, "stream": True}
        began, left = threading.Event(), threading.Event()

        def occupy():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: ") and json.loads(line[6:])["choices"][0]["text"]:
                        began.set()
                    if left.is_set():
                        return

        thread = threading.Thread(target=occupy)
        thread.start()
        try:
            assert began.wait(60)
            terminal.send("Hi\r")
            terminal.until("next in the queue, about ")
        finally:
            left.set()
            thread.join()
        text = terminal.until(is_idle_after("first token after"))
    assert "next in the queue" not in text


def test_what_is_typed_is_answered_after_the_server_has_gone(chat, server):
    """I16: the turn fails in one line, and the chat goes on."""
    with chat() as terminal:
        terminal.until(is_idle_after("/help says"))
        server.stop()
        terminal.send("Hi\r")
        terminal.until(is_idle_after("stoker: "))
        terminal.send("/exit\r")
        assert terminal.ended() == 0
