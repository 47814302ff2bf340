"""Loading, unloading and pinning models over HTTP, and what the status and the metrics say of models."""

from __future__ import annotations

import httpx
import msgspec
import psutil
import pytest
import stand_in
from prometheus_client.parser import text_string_to_metric_families
from stand_in import INFO

from stoker.errors import InsufficientMemoryError, ModelTooLargeError
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.status import DeviceStatus, EngineStatus, MemoryStatus, ModelStatus
from stoker.runtime import Runtime

MODELS = "/v1/runtime/models"
MEMORY = MemoryStatus(
    limit=1000,
    footprint=800,
    available=200,
    tier="low",
    pressure="warning",
    pressure_fraction=0.8,
    pressure_source="footprint",
    rungs=["trim_allocator"],
    lines={"weights": 500, "kv": 200},
    heat="serious",
)


def engine_with(models=(), memory=MEMORY):
    """An engine with these models and this memory."""
    return EngineStatus(
        slots=[],
        queue=[],
        parked=[],
        counters={},
        kv_cells_total=1,
        kv_cells_used=0,
        models=list(models),
        memory=memory,
    )


def metric(http, name, **labels):
    """One sample of /metrics."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }[tuple(sorted(labels.items()))]


def test_a_model_is_loaded_with_what_was_asked_for(scripted, scripted_http):
    """SPEC I2, I4, R8: id, keep_alive, ctx_size and slots reach the runtime; the answer has the limits."""
    body = {"model": "stand-in", "keep_alive": "10m", "ctx_size": 512, "slots": 2}
    answer = scripted_http.post(f"{MODELS}/load", json=body)
    assert answer.json() == {
        "id": "stand-in",
        "state": "ready",
        "label": INFO.label,
        "backend": INFO.backend,
        "backend_reason": None,
        "n_ctx": INFO.n_ctx,
        "num_slots": INFO.num_slots,
        "bytes": INFO.memory_bytes,
        "degraded": [],
    }
    assert scripted.runtime.calls == [("load", "stand-in", 600.0, 512, 2)]
    assert scripted_http.post(f"{MODELS}/load", json={"model": "default", "keep_alive": -1}).is_success
    assert scripted.runtime.calls[1] == ("load", "stand-in", -1.0, None, None)


def test_the_list_says_what_cells_and_which_attention_a_model_has(scripted_http, monkeypatch):
    """SPEC C21: as they are; before its first load, and of a model that keeps no cells, nothing."""
    names = ("kv_type", "kv_layout", "flash_attention", "repeatable")

    def told(info):
        monkeypatch.setattr(stand_in, "INFO", info)
        (found,) = scripted_http.get("/v1/models").json()["data"]
        return [found["meta"][name] for name in names]

    loaded = msgspec.structs.replace(INFO, num_cells=64, kv_layout="pool")
    assert told(loaded) == ["f16", "pool", "off", False]
    assert told(ModelInfo.bare(ModelSpec(id="m", path="m", kv_type="q8_0"))) == [None] * 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": "m", "keep_alive": "soon"}, "keep_alive"),
        ({"model": "m", "keep_alive": True}, "keep_alive"),
        ({"model": "m", "ctx_size": -1}, "ctx_size"),
        ({"model": "m", "slots": 0}, "slots"),
        ({"model": "m", "slots": 257}, "slots"),
    ],
)
def test_a_malformed_load_is_refused_with_its_field(scripted, scripted_http, body, param):
    """SPEC S3, I2: and nothing is asked of the runtime."""
    answer = scripted_http.post(f"{MODELS}/load", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert scripted.runtime.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InsufficientMemoryError("needs 5, free 3, margin 1, evictable 0"), 503),
        (ModelTooLargeError("needs 5, the limit is 3"), 422),
    ],
)
def test_a_refused_load_tells_its_numbers(scripted, scripted_http, error, status):
    """SPEC R1, R2: by code and status; what may succeed later says when to ask again."""
    scripted.runtime.load_error = error
    answer = scripted_http.post(f"{MODELS}/load", json={"model": "m"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, error.code)
    assert answer.json()["error"]["message"] == error.message
    assert ("retry-after" in answer.headers) is (status == 503)


def test_a_load_whose_caller_leaves_is_given_up(scripted, until):
    """SPEC R4: nobody else asked for it."""
    scripted.runtime.load_waits = True
    hasty = httpx.Timeout(60, read=0.2)
    with httpx.Client(base_url=scripted.url, timeout=hasty) as http, pytest.raises(httpx.ReadTimeout):
        http.post(f"{MODELS}/load", json={"model": "m"})
    until(lambda: ("load given up", "m") in scripted.runtime.calls)


def test_a_model_is_unloaded_and_pinned_by_id(scripted, scripted_http):
    """SPEC I4, R3: "default" is the first; an unknown one is a 404."""
    unloaded = scripted_http.post(f"{MODELS}/unload", json={"model": "default"})
    assert unloaded.json() == {"id": "stand-in", "state": "absent"}
    for pinned in (True, False):
        answer = scripted_http.post(f"{MODELS}/pin", json={"model": "stand-in", "pinned": pinned})
        assert answer.json() == {"id": "stand-in", "pinned": pinned}
    assert scripted_http.post(f"{MODELS}/pin", json={"model": "stand-in"}).json()["pinned"] is True
    assert scripted.runtime.calls == [
        ("unload", "stand-in"),
        ("pin", "stand-in", True),
        ("pin", "stand-in", False),
        ("pin", "stand-in", True),
    ]
    for verb in ("unload", "pin"):
        gone = scripted_http.post(f"{MODELS}/{verb}", json={"model": "none"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_the_status_shows_models_memory_and_heat_as_the_engine_knows_them(scripted, scripted_http):
    """SPEC I4, M3, M6: states, bytes, pins and leases; limit, footprint, pressure; heat."""
    scripted.runtime.engine = engine_with(
        [
            ModelStatus(
                id="stand-in",
                state="ready",
                bytes={"weights": 5, "kv": 2, "compute": 1},
                is_pinned=True,
                leases=3,
                keep_alive_s=600.0,
                unload_in_s=None,
                degraded=["context 4096 instead of 16384"],
            ),
            ModelStatus(id="other", state="loading", stage="weights", fraction=0.25, reason="swap"),
        ]
    )
    status = scripted_http.get("/v1/runtime").json()
    first, second = status["models"]
    assert first == {
        "id": "stand-in",
        "activity": {},  # the stand-in makes no steps
        "state": "ready",
        "stage": "",
        "streaming": None,
        "num_bytes": 0,
        "fraction": 0.0,
        "bytes": {"weights": 5, "kv": 2, "compute": 1},
        "pinned": True,
        "leases": 3,
        "keep_alive_s": 600.0,
        "unload_in_s": None,
        "degraded": ["context 4096 instead of 16384"],
        "reason": "",
    }
    assert (second["id"], second["state"], second["stage"], second["fraction"]) == (
        "other",
        "loading",
        "weights",
        0.25,
    )
    assert status["heat"] == "serious"
    assert status["memory"] == {
        "physical": psutil.virtual_memory().total,
        "heat": "serious",
        "devices": [],
        "ladder": [],
        "thresholds": {},
        "limit": 1000,
        "footprint": 800,
        "available": 200,
        "tier": "low",
        "pressure": "warning",
        "pressure_fraction": 0.8,
        "pressure_source": "footprint",
        "rungs": ["trim_allocator"],
        "lines": {"weights": 500, "kv": 200},
    }


def test_without_an_engine_the_status_shows_what_the_front_knows(scripted, scripted_http):
    """SPEC I4, S6: models of the roster, memory measured here, no pressure that nobody measured."""
    scripted.runtime.engine = engine_with(memory=MemoryStatus())
    status = scripted_http.get("/v1/runtime").json()
    assert [(model["id"], model["state"]) for model in status["models"]] == [("stand-in", "ready")]
    assert status["memory"]["limit"] > status["memory"]["footprint"] > 0
    assert status["memory"]["pressure"] is None


def test_each_accelerator_is_shown_and_measured(scripted, scripted_http):
    """SPEC M9, O1: in status all there is; in metrics what is known of those with memory of their own."""
    card = DeviceStatus(
        id="CUDA0", name="H100", kind="CUDA", total=80, free=20, own=50, others=10, power_w=3.5
    )
    loading = msgspec.structs.replace(card, id="CUDA1", own=None, others=None, power_w=None, celsius=44)
    cpu = DeviceStatus(id="CPU", name="CPU", kind="CPU")
    scripted.runtime.engine = msgspec.structs.replace(engine_with(), devices=[cpu, card, loading])
    shown = scripted_http.get("/v1/runtime").json()["engine"]["devices"]
    assert shown == msgspec.to_builtins([cpu, card, loading])
    text = scripted_http.get("/metrics").text
    found = sorted(
        line.removeprefix("stoker:") for line in text.splitlines() if line.startswith("stoker:device_")
    )
    assert found == [
        'device_celsius{device="CUDA1"} 44.0',
        *(f'device_held_by_another{{device="{device}"}} 0.0' for device in ("CPU", "CUDA0", "CUDA1")),
        'device_memory_bytes{device="CUDA0",held_by="free"} 20.0',
        'device_memory_bytes{device="CUDA0",held_by="others"} 10.0',
        'device_memory_bytes{device="CUDA0",held_by="own"} 50.0',
        'device_memory_bytes{device="CUDA1",held_by="free"} 20.0',
        *(f'device_memory_total_bytes{{device="{device}"}} 80.0' for device in ("CUDA0", "CUDA1")),
        'device_power_watts{device="CUDA0"} 3.5',
        *(f'device_used{{device="{device}"}} 0.0' for device in ("CPU", "CUDA0", "CUDA1")),
    ]


def test_the_metrics_show_models_memory_pressure_and_heat(scripted, scripted_http):
    """SPEC O1: memory by ledger line, pressure and heat level, models by state."""
    scripted.runtime.engine = engine_with(
        [ModelStatus(id="stand-in", state="ready"), ModelStatus(id="b", state="absent")]
    )
    for name, labels, value in (
        ("models", {"state": "ready"}, 1),
        ("models", {"state": "absent"}, 1),
        ("models", {"state": "failed"}, 0),
        ("memory_bytes", {"line": "weights"}, 500),
        ("memory_bytes", {"line": "kv"}, 200),
        ("memory_limit_bytes", {}, 1000),
        ("memory_footprint_bytes", {}, 800),
        ("memory_available_bytes", {}, 200),
        ("memory_pressure_fraction", {}, 0.8),
        ("memory_pressure", {"level": "warning"}, 1),
        ("memory_pressure", {"level": "normal"}, 0),
        ("heat", {"level": "serious"}, 1),
        ("heat", {"level": "nominal"}, 0),
    ):
        assert metric(scripted_http, f"stoker:{name}", **labels) == value
    scripted.runtime.engine = engine_with(memory=MemoryStatus())
    assert "stoker:memory_limit_bytes" not in scripted_http.get("/metrics").text


@pytest.mark.parametrize(
    ("given", "seconds"), [(90, 90.0), (0, 0.0), ("10m", 600.0), ("-1", -1.0), (None, None), (1.5, 1.5)]
)
def test_a_request_says_how_long_its_model_stays(scripted, scripted_http, given, seconds):
    """SPEC I7, R8: seconds or such as 10m, in both generating routes."""
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert scripted_http.post(path, json={**body, "keep_alive": given}).is_success
    assert [request.keep_alive_s for request in scripted.runtime.requests] == [seconds, seconds]


@pytest.mark.parametrize("given", ["soon", "10 years", True, [], ""])
def test_a_keep_alive_that_is_no_time_is_refused(scripted_http, given):
    """SPEC I7, S3: naming the field."""
    refused = scripted_http.post("/v1/completions", json={"prompt": "x", "keep_alive": given})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("keep_alive")


def test_a_load_is_refused_while_the_server_stops(scripted, scripted_http):
    """SPEC L4: intake ends first."""
    context = scripted.service.context
    try:
        scripted.call(lambda: setattr(context, "is_stopping", True))
        assert scripted_http.post(f"{MODELS}/load", json={"model": "m"}).status_code == 503
        assert scripted.runtime.calls == []
    finally:
        scripted.call(lambda: setattr(context, "is_stopping", False))


def test_a_model_goes_and_comes_back_with_the_next_request(start_server):
    """SPEC R3, S6, I4: looking at it does not load it; a request does; a pin and a load are seen."""
    server = start_server(lambda: Runtime(model="fake:eog_period=0", isolation="thread"))
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def model():
            (found,) = http.get("/v1/runtime").json()["models"]
            return found

        assert http.post(f"{MODELS}/unload", json={"model": "default"}).json()["state"] == "absent"
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/runtime/requests"):
            assert http.get(path).is_success
        assert model()["state"] == "absent"
        assert metric(http, "stoker:models", state="absent") == 1
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).is_success
        assert (model()["state"], model()["pinned"]) == ("ready", False)
        assert http.post(f"{MODELS}/pin", json={"model": "fake"}).is_success
        assert model()["pinned"]
        loaded = http.post(f"{MODELS}/load", json={"model": "fake", "ctx_size": 512, "keep_alive": "5m"})
        assert (loaded.json()["state"], loaded.json()["n_ctx"]) == ("ready", 512)
        assert model()["keep_alive_s"] == 300.0
