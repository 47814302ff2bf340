"""Servers on accelerators that they share with other programs and with each other: fake cards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.errors import DeviceBusyError, InsufficientMemoryError
from stoker.runtime import Runtime

MIB = 2**20
CARD_MIB = 8192
MODELS = "/v1/runtime/models"
START_S = 60


class Card:
    """A card of 8 GiB of which other programs hold what a test says."""

    def __init__(self, folder: Path) -> None:
        self._others = folder / "others"
        self._folders = {name: folder / name for name in ("cache_dir", "run_dir", "models_dir", "states_dir")}
        self.fill(0)

    def fill(self, others_mib: int) -> None:
        """Other programs hold so much of it from now on."""
        news = self._others.with_suffix(".news")  # engines read it any time: all of it or what was before
        news.write_text(str(others_mib), "ascii")
        news.replace(self._others)

    def model(self, name: str, weights_mib: int, **orders: Any) -> str:
        """A model of that size that is computed on it."""
        given = {"id": name, "weights_mib": weights_mib, "cell_kib": 16, "eog_period": 0, **orders}
        there = {"device": "Card", "device_mib": CARD_MIB, "others": self._others}
        return "fake:" + ",".join(f"{key}={value}" for key, value in (given | there).items())

    def runtime(self, *models: str, **settings: Any) -> Callable[[], Runtime]:
        """Makes a runtime of these models with an engine of its own process."""
        return lambda: Runtime(
            models[0], models=models[1:], **({"ctx_size": 4096} | self._folders | settings)
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `stoker` with the folders of this card's servers."""
        folders = [f"--{name.replace('_', '-')}={path}" for name, path in self._folders.items()]
        command = [sys.executable, "-P", "-m", "stoker.cli", *words]
        command += folders if words[0] == "serve" else []
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """An empty card."""
    return Card(tmp_path)


@contextmanager
def asking(server: Any) -> Any:
    """A client of a server that is ready."""
    server.ready.result(START_S)
    with httpx.Client(base_url=server.url, timeout=START_S) as http:
        yield http


def completion(http: httpx.Client, model: str, num_tokens: int, on_token: Any = None) -> str:
    """One streamed answer, whole; `on_token` hears how many tokens there are."""
    body = {"model": model, "prompt": "hello", "max_tokens": num_tokens, "temperature": 0, "stream": True}
    text, num = "", 0
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line.removeprefix("data: "))
                assert "error" not in said, said
                text += said["choices"][0]["text"] if said["choices"] else ""
                num += 1
                if on_token is not None:
                    on_token(num)
    return text


def states(http: httpx.Client) -> dict[str, str]:
    """The models and how they are."""
    return {model["id"]: model["state"] for model in http.get("/v1/runtime").json()["models"]}


@pytest.mark.long
def test_a_plan_counts_what_another_program_has_of_the_card(card: Card) -> None:
    """M9, R2: half of it is filled, and what fits the card is weighed against the other half."""
    card.fill(CARD_MIB // 2)
    fits = card.command("plan", card.model("m", 2000), "--json")
    found = json.loads(fits.stdout)
    (there,) = found["devices"]
    assert (fits.returncode, found["verdict"]) == (0, "fits")
    assert (there["free_bytes"], there["limit_bytes"]) == (CARD_MIB // 2 * MIB, CARD_MIB * MIB)
    parted = card.command("plan", card.model("m", 5000), "--json")
    found = json.loads(parted.stdout)
    assert (parted.returncode, found["verdict"]) == (0, "degraded")
    assert "layers on Card, the others on the CPU" in found["degraded"][0]
    refused = card.command("plan", card.model("m", 5000), "--json", "--gpu-layers", "all")
    found = json.loads(refused.stdout)
    assert (refused.returncode, found["verdict"]) == (1, "insufficient")
    assert "of Card at the least" in found["reason"]
    card.fill(0)
    assert card.command("plan", card.model("m", 5000), "--gpu-layers", "all").returncode == 0


@pytest.mark.long
def test_a_card_that_another_program_fills_refuses_with_numbers_and_then_takes_idle_models(
    card: Card, start_server: Callable[..., Any], until: Callable[[Callable[[], bool]], None]
) -> None:
    """M3, M9, R2: each load is weighed anew; who reads an answer reads all of it."""
    card.fill(CARD_MIB // 2)
    first, second = card.model("first", 2000, step_delay_s=0.02), card.model("second", 3000)
    server = start_server(card.runtime(first, second, gpu_layers="all"))
    with asking(server) as http:
        undisturbed = completion(http, "first", 150)
        assert states(http) == {"first": "ready", "second": "absent"}
        assert http.post(f"{MODELS}/pin", json={"model": "first"}).is_success
        refused = http.post(f"{MODELS}/load", json={"model": "second"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "insufficient_memory")
        assert error["details"]["device"] == "Card"
        assert error["details"]["needed"] > error["details"]["free"] - error["details"]["margin"]
        card.fill(0)
        assert http.post(f"{MODELS}/load", json={"model": "second"}).is_success
        (shown,) = http.get("/v1/runtime").json()["engine"]["devices"]
        assert shown["own"] > 5000 * MIB

        def others_come(num_tokens: int) -> None:
            if num_tokens == 5:
                card.fill(CARD_MIB - 2600)

        assert completion(http, "first", 150, others_come) == undisturbed
        until(lambda: states(http) == {"first": "ready", "second": "absent"})
        (shown,) = http.get("/v1/runtime").json()["engine"]["devices"]
        assert shown["others"] == (CARD_MIB - 2600) * MIB


@pytest.mark.long
def test_a_second_server_on_the_card_is_told_whose_it_is(
    card: Card, start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """R6: by pid and model, in one line and with exit code 2; or both share it where both say so."""
    first = start_server(card.runtime(card.model("first", 100)))
    with asking(first) as http:
        text = completion(http, "first", 20)
        pid = http.get("/v1/runtime").json()["engine"]["pid"]
        refused = card.command("serve", "--port", "0", "--model", card.model("second", 100))
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert "holds the device" in refused.stderr
        assert "model first" in refused.stderr
        assert "Traceback" not in refused.stderr
        elsewhere = {"run_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
        other = start_server(card.runtime(card.model("second", 100), **elsewhere))
        with pytest.raises(DeviceBusyError) as busy:
            other.wait_ended()
        assert busy.value.details == {"device": "Fake Card", "pid": pid, "models": ["first"]}
        shared = card.runtime(card.model("second", 100), **elsewhere, device_lease=False)
        with asking(start_server(shared)) as there:
            assert completion(there, "second", 20) == text
        assert completion(http, "first", 20) == text


def test_a_context_that_the_card_cannot_hold_becomes_a_smaller_one_or_an_error_with_numbers(
    card: Card, start_server: Callable[..., Any]
) -> None:
    """R2, R11: cells of a mebibyte, 16,384 of them; what cannot be held in any form names both numbers."""
    card.fill(1024)
    large = card.model("large", 1000, cell_kib=1024)
    with asking(start_server(card.runtime(large, ctx_size=16384, gpu_layers="all"))) as http:
        (model,) = http.get("/v1/runtime").json()["models"]
        assert (model["state"], model["degraded"]) == ("ready", ["context 4096 instead of 16384"])
        assert sum(model["bytes"].values()) < (CARD_MIB - 1024 - 512) * MIB
        assert completion(http, "large", 20)
    whole = card.runtime(card.model("whole", CARD_MIB), gpu_layers="all")
    with pytest.raises(InsufficientMemoryError, match="layers would fit: --gpu-layers") as refused:
        start_server(whole).wait_ended()
    found = refused.value.details
    assert (found["device"], found["free"]) == ("Card", (CARD_MIB - 1024) * MIB)
    assert found["needed"] > CARD_MIB * MIB


@pytest.mark.long
def test_a_killed_engine_gives_the_card_back_and_loses_nothing(
    card: Card, start_server: Callable[..., Any]
) -> None:
    """L3: the stream goes on with the same text, and the next engine holds what the first one held."""
    server = start_server(card.runtime(card.model("m", 6000, step_delay_s=0.01)))
    with asking(server) as http:
        undisturbed = completion(http, "m", 200)
        before = http.get("/v1/runtime").json()["engine"]
        killed: list[int] = []

        def kill(num_tokens: int) -> None:
            if num_tokens == 20:
                killed.append(before["pid"])
                os.kill(before["pid"], signal.SIGKILL)

        assert completion(http, "m", 200, kill) == undisturbed
        after = http.get("/v1/runtime").json()["engine"]
        assert killed == [before["pid"]] != [after["pid"]]
        assert after["restarts"] == 1
        assert [each["own"] for each in after["devices"]] == [each["own"] for each in before["devices"]]
