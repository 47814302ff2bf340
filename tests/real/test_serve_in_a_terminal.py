"""`stoker serve` with the default model, as a person starts and stops it."""

from __future__ import annotations

import json
import re
import signal
import threading

import httpx
import pytest

from terminal import Terminal

MESSAGES = [{"role": "user", "content": "Tell a long story of a ship."}]


@pytest.mark.long
def test_it_serves_shows_and_ends_in_the_middle_of_an_answer(tmp_path):
    """T14: the engine is another process here; the stream that is cut short has an end."""
    env = {name: str(tmp_path) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")}
    with Terminal("stoker", "serve", "--port", "0", "--drain-s", "600", env=env) as terminal:
        shown = terminal.until("0 running")
        assert re.search(r"^  computes on +llama\.cpp · ", shown, re.MULTILINE)
        ready = json.loads(re.search(r"\{\"event\".*?\}", shown.replace("\n", "")).group())
        url = f"http://127.0.0.1:{ready['port']}/v1/chat/completions"
        answer = httpx.post(url, json={"messages": MESSAGES, "max_tokens": 8}, timeout=120)
        assert answer.status_code == 200
        terminal.until(
            lambda terminal: re.search(r"interactive +\d+ in +8 out .* length smollm2", terminal.text)
        )
        lines, has_begun = [], threading.Event()

        def read():
            body = {"messages": MESSAGES, "stream": True, "max_tokens": 4000, "ignore_eos": True}
            with httpx.stream("POST", url, json=body, timeout=120) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    has_begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(120)
        terminal.send("\x03")
        terminal.until("1 request is finishing; Ctrl-C again ends at once")
        terminal.send("\x03")
        assert terminal.ended() == 128 + signal.SIGINT
        reader.join(120)
        assert [line for line in lines if line][-1] == "data: [DONE]"
