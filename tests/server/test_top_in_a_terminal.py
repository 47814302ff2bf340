"""`stoker top` against a real server: on a terminal with keys, in a pipe, without colours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import httpx
import pytest

from stoker.runtime import Runtime
from terminal import Terminal

BODY = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
PATIENCE_S = 60
WRITTEN = re.compile(r"decode .* ([\d,]+)/100,000")


@pytest.fixture
def server(start_server):
    """One slot, and steps slow enough that an answer does not end during a test."""
    model = "fake:eog_period=0,step_delay_s=0.02"
    found = start_server(lambda: Runtime(model=model, isolation="thread", slots=1))
    found.ready.result(PATIENCE_S)
    return found


class Streams:
    """Requests that run until they are cancelled; `ids` are the runtime's."""

    def __init__(self, url):
        self._url = url
        self._threads = []
        self.ids = []

    def begin(self, **fields):
        """One more; returns when it was taken in."""
        has_begun = threading.Event()

        def read():
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=BODY | fields, timeout=60
            ) as answer:
                self.ids.append(answer.headers["X-Request-Id"])
                has_begun.set()
                for _ in answer.iter_raw():
                    pass

        self._threads.append(threading.Thread(target=read))
        self._threads[-1].start()
        assert has_begun.wait(PATIENCE_S)

    def join(self):
        """Wait for the ends of all."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def line_with(terminal, word):
    """The line of the screen that has that word; empty: none has."""
    return next((line for line in terminal.lines if word in line), "")


@pytest.mark.long
def test_a_person_sees_who_has_the_slot_and_steers_by_keys(server):
    """O16: the slot, pause, resume and cancel of the selected row, a narrower window, q."""
    streams = Streams(server.url)
    streams.begin()
    with Terminal("stoker", "top", "--url", server.url, columns=100, rows=24) as terminal:
        terminal.until(lambda shown: re.search(r"fake +0 interactive decode", shown.text))
        assert "nobody waits" in terminal.text
        written = WRITTEN.search(terminal.text)[1]
        terminal.until(lambda shown: WRITTEN.search(shown.text)[1] != written)
        terminal.send("p")
        terminal.until("select a request with")
        terminal.send("\x1b[B")
        terminal.until(lambda shown: any(line.startswith("cmpl-") for line in shown.lines))
        terminal.send("p")
        terminal.until(lambda shown: re.search(r"interactive paused", line_with(shown, " paused ")))
        assert "idle" in line_with(terminal, "fake          0")
        terminal.send("r")
        terminal.until(lambda shown: re.search(r"0 interactive (prefill|decode)", shown.text))
        terminal.resize(60)
        terminal.until(lambda shown: shown.lines and max(map(len, shown.lines)) <= 60)
        terminal.send("c")
        terminal.until("c again does")
        terminal.send("c")
        terminal.until(lambda shown: "cancelled" in line_with(shown, "cancelled"))
        terminal.send("q")
        assert terminal.ended() == 0
    streams.join()


def test_a_preemption_is_seen_with_its_reason(server):
    """O16: a job gives its slot to a person and stands in the line as parked."""
    streams = Streams(server.url)
    streams.begin(service_tier="flex")
    with Terminal("stoker", "top", "--url", server.url, columns=140, rows=30) as terminal:
        terminal.until(lambda shown: re.search(r"0 background +decode", shown.text))
        streams.begin()
        terminal.until(lambda shown: re.search(r"background +parked .*gave its slot to", shown.text))
        assert re.search(r"fake +0 interactive", terminal.text)
        terminal.send("q")
        assert terminal.ended() == 0
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        for request_id in streams.ids:
            http.post(f"/v1/runtime/requests/{request_id}/cancel").raise_for_status()
    streams.join()


def test_a_pipe_gets_one_frame_and_a_program_json(server):
    """O16: no escapes, no keys; every row however many there are."""
    command = [sys.executable, "-m", "stoker.cli", "top", "--url", server.url]
    frame = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    assert "\x1b" not in frame
    assert re.search(r"^Stoker \S+ · serving for", frame)
    assert re.search(r"^fake +0 +idle", frame, re.MULTILINE)
    asked = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    document = json.loads(asked.stdout)
    assert (document["event"], document["schema"]) == ("snapshot", 2)


def test_without_colours_there_is_none(server):
    """O16: NO_COLOR; what is selected and what is bold stays so."""
    with Terminal("stoker", "top", "--url", server.url, env={"NO_COLOR": "1"}) as terminal:
        terminal.until("nobody waits")
        terminal.send("q")
        assert terminal.ended() == 0
        colours = re.findall(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|9[0-7]|38|48)[;m]", terminal.transcript)
        assert colours == []


def test_without_a_server_it_ends_with_a_line(tmp_path):
    """O16, T1: as every command that asks one."""
    with Terminal("stoker", "top", "--url", "http://127.0.0.1:9") as terminal:
        assert terminal.ended() == 2
        assert "no server answers at" in terminal.text.replace("\n", "")


def test_a_server_that_goes_away_is_said_and_waited_for(server):
    """O16: the last state stays on the screen, and the first line says how old it is."""
    with Terminal("stoker", "top", "--url", server.url) as terminal:
        terminal.until("nobody waits")
        server.stop()
        terminal.until("trying again: ")
        terminal.until("the server has not answered for")
        assert "nobody waits" in terminal.text
        terminal.send("q")
        assert terminal.ended() == 0
