"""Models on accelerators, seen from outside: a loop on a machine with fake cards."""

import msgspec
import pytest

from memory_stand_in import MIB
from stoker.backends.fake.backend import FakeBackend
from stoker.backends.fake.devices import FakeDevices
from stoker.backends.fake.faults import FakeFaults
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import InsufficientMemoryError, StepMemoryError
from stoker.ipc.commands import KnowModel, UnloadModel
from stoker.ipc.events import Failed, ModelState
from stoker.ipc.model import PlacementSpec

TWO = "eog_period=0,weights_mib=300,device={0}-1+{0}-2,device_mib=500+500"
ONE = "eog_period=0,weights_mib=300,device={0}-1,device_mib={1}"


def held(machine, model):
    """MiB that it has of each card."""
    backend = machine.loop._runners.find(model).backend
    found = backend.extensions.devices.memory_by_device()
    return {card: sum(lines.values()) // MIB for card, lines in found.items()}


def refusal(machine, model):
    """Why it could not be loaded."""
    machine.until(lambda: machine.state(model) == "failed")
    return [event.error for event in machine.of(ModelState) if event.model == model and event.error][-1]


def test_the_second_model_goes_to_the_other_card(make):
    """SPEC R11: each lies whole on one; host memory is not asked for what a card holds."""
    machine = make(limit_mib=400, device_lease=False)
    machine.have("a", order=TWO.format("other"))
    machine.have("b", order=TWO.format("other"))
    assert [held(machine, model) for model in "ab"] == [{"other-1": 300}, {"other-2": 300}]
    assert machine.info("b").label == "fake · other-2"
    assert machine.info("b").degraded == []
    assert machine.ledger.get("weights", 0) == 0
    lines = machine.loop._store.ledger.device_lines()
    assert lines["other-1"]["weights"] == lines["other-2"]["weights"] == 300 * MIB


def test_an_idle_model_goes_for_the_card_that_it_holds_and_no_other(make):
    """SPEC R3, R11: the longest unused of those that hold something of it."""
    machine = make(device_lease=False)
    machine.have("old", order="eog_period=0,weights_mib=10")
    machine.have("a", order=TWO.format("idle"))
    machine.have("b", order=TWO.format("idle"))
    machine.have("c", order=TWO.format("idle"))
    assert [machine.state(model) for model in ("old", "a", "b", "c")] == ["ready", "absent", "ready", "ready"]
    assert held(machine, "c") == {"idle-1": 300}
    machine.submit("r", "b")
    machine.run("r")


def test_a_card_that_is_too_small_holds_fewer_layers_and_the_model_says_so(make):
    """SPEC R2, R11: the rest in host memory, counted there."""
    machine = make(device_lease=False)
    machine.have("a", order=ONE.format("small", 200) + ",token_delay_s=0.0001")
    layers, cost = machine.info("a").degraded
    assert layers.endswith("of 9 layers on small-1, the others on the CPU")
    assert cost == "one request alone got 1e+04 tokens/s in a trial"
    assert 150 < held(machine, "a")["small-1"] <= 200
    on_card = machine.loop._store.ledger.device_lines()["small-1"]["weights"]
    assert machine.ledger["weights"] + on_card == 300 * MIB


def test_what_was_asked_of_a_card_is_refused_with_numbers(make):
    """SPEC R1, R11: needed, free, which device, what would fit and the flag for it; others run on."""
    machine = make(device_lease=False)
    machine.have("fine", order="eog_period=0")
    whole = PlacementSpec(gpu_layers="all")
    machine.load(machine.know("a", ONE.format("asked", 200), placement=whole))
    error = refusal(machine, "a")
    assert error.code == "insufficient_memory"
    assert error.details["device"] == "asked-1"
    assert error.details["free"] == 200 * MIB < error.details["needed"]
    layers = error.details["layers"]
    assert f"{layers} of 9 layers would fit: --gpu-layers {layers}, or auto" in error.message
    machine.have("b", order=ONE.format("asked", 200), placement=PlacementSpec(gpu_layers=layers))
    assert machine.state("fine") == "ready"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(make):
    """SPEC R11: at the load, as only the engine knows devices."""
    machine = make(device_lease=False)
    machine.load(machine.know("a", ONE.format("known", 200), placement=PlacementSpec(device=("CUDA9",))))
    error = refusal(machine, "a")
    assert (error.code, error.param, error.details) == ("invalid_request", "device", {"devices": ["known-1"]})


def test_a_model_that_fills_its_card_is_loaded_otherwise_there_and_not_beside_itself(make):
    """SPEC L5, R11: without requests it goes first; with some it stays as it is, and they keep the card."""
    machine = make(device_lease=False)
    machine.have("a", order=ONE.format("filled", 500), n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    machine.submit("r", "a", max_tokens=400)  # it runs on while the header is read
    machine.until_tokens("r", 5)
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: [event for event in machine.of(ModelState) if event.error])
    (error,) = [event.error for event in machine.of(ModelState) if event.error]
    assert (error.code, error.details) == ("model_in_use", {"num_requests": 1})
    assert "1 request runs on a" in error.message
    machine.run("r")
    assert machine.info("a").num_slots == spec.num_slots
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: machine.info("a").num_slots == 2)
    assert machine.state("a") == "ready"
    assert machine.info("a").degraded == []
    assert held(machine, "a") == {"filled-1": 300}


@pytest.fixture
def refused_forms(monkeypatch):
    """Loads with so much context are refused by the card, which was thought to have room for them."""
    take, forms = FakeDevices.take, set()

    def taken(self, owner, lines):
        if owner.capabilities.n_ctx in forms:
            raise InsufficientMemoryError("cudaMalloc failed", needed=MIB, free=0, device="back-1")
        take(self, owner, lines)

    monkeypatch.setattr(FakeDevices, "take", taken)
    return forms


def test_a_model_that_went_for_another_load_of_itself_comes_back_where_that_fails(make, refused_forms):
    """SPEC L5: who asked is told why, once it is back; a request of that time is served by it."""
    machine = make(device_lease=False)
    whole = PlacementSpec(gpu_layers="all")
    machine.have("a", order=ONE.format("back", 500), n_ctx=512, placement=whole)
    spec = machine.residency._catalogue.get("a").spec
    refused_forms.add(1024)
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    machine.until(lambda: machine.state("a") != "ready")
    machine.submit("r", "a", max_tokens=4)
    machine.run("r")
    assert machine.info("a").n_ctx == 512
    told = [(event.state, event.error.code if event.error else "") for event in machine.of(ModelState)]
    assert [state for state, _ in told].count("failed") == 0
    assert [state for state, code in told if code] == ["ready"]
    assert told[-1] == ("ready", "insufficient_memory")
    assert machine.residency._catalogue.get("a").spec == spec
    refused_forms.clear()
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))  # nothing of the failure is left
    machine.until(lambda: machine.info("a").n_ctx == 1024)
    assert [event.error for event in machine.of(ModelState)][-1] is None


@pytest.fixture
def gone(make, refused_forms):
    """A machine whose model has gone for a load that will be refused, and how it was loaded before."""
    machine = make(device_lease=False)
    machine.have("a", order=ONE.format("back", 500), n_ctx=512, placement=PlacementSpec(gpu_layers="all"))
    spec = machine.residency._catalogue.get("a").spec
    refused_forms.add(1024)
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    machine.until(lambda: machine.state("a") != "ready")
    return machine, spec


@pytest.mark.parametrize("is_refused", [False, True], ids=["fits", "is refused too"])
def test_a_load_asked_for_while_it_comes_back_has_its_own_end(gone, refused_forms, is_refused):
    """SPEC L5: it is in memory as asked for last, or as it was; nobody is told of another's failure."""
    machine, spec = gone
    machine.until(lambda: machine.residency._catalogue.get("a").refused)
    if is_refused:
        refused_forms.add(768)
    machine.load(msgspec.structs.replace(spec, n_ctx=768))
    machine.until(lambda: machine.state("a") == "ready")
    assert machine.info("a").n_ctx == (512 if is_refused else 768)
    error = machine.of(ModelState)[-1].error
    assert (error.code if error else None) == ("insufficient_memory" if is_refused else None)


@pytest.mark.parametrize("way", ["unloaded", "under pressure"])
def test_a_load_that_is_given_up_changes_nothing_of_how_the_model_is_served(gone, refused_forms, way):
    """SPEC L5, M4: the next request finds it as it was before that load, as the client believes."""
    machine, spec = gone
    refused_forms.clear()
    if way == "unloaded":
        machine.send(UnloadModel("a"))
    else:
        machine.residency.step_aside(0.0)
    machine.submit("r", "a", max_tokens=4)
    machine.run("r")
    assert machine.info("a").n_ctx == 512
    assert machine.residency._catalogue.get("a").spec == spec


def test_a_reload_that_pressure_ends_is_no_success(make):
    """SPEC M4, L5: the pinned model serves on as it was, and who asked for more is told so."""
    machine = make(device_lease=False)
    machine.have("a", order="eog_period=0,load_s=0.3", n_ctx=512)
    served = machine.residency._catalogue.get("a")
    served.is_pinned = True
    machine.load(msgspec.structs.replace(served.spec, n_ctx=1024))
    machine.until(lambda: machine.residency._load is not None and machine.residency._load.fitted)
    machine.residency.step_aside(0.0)
    machine.turn()
    event = machine.of(ModelState)[-1]
    assert (event.state, event.error.code) == ("ready", "not_ready")
    assert "memory is short" in event.error.message
    assert event.info.n_ctx == 512


def test_how_long_a_model_stays_outlasts_a_reload_that_fails(gone):
    """SPEC R8, L5: it was told beside that load, and is no part of how the model is loaded."""
    machine, _ = gone
    served = machine.residency._catalogue.get("a")
    machine.send(KnowModel(msgspec.structs.replace(served.settled, keep_alive_s=5.0)))
    machine.until(lambda: machine.state("a") == "ready")
    machine.submit("r", "a", max_tokens=4)
    machine.run("r")
    assert (machine.info("a").n_ctx, served.keep_alive_s) == (512, 5.0)
    machine.load(msgspec.structs.replace(served.spec, keep_alive_s=7.0))  # nothing else: it is kept
    machine.until(lambda: not served.is_asked)
    machine.submit("s", "a", max_tokens=4)
    machine.run("s")
    assert served.keep_alive_s == 7.0


def test_an_unload_takes_back_a_load_that_has_not_begun(make):
    """SPEC L5, R7: it waited for memory; the next request finds the model as it was."""
    machine = make(device_lease=False)
    machine.have("a", order="eog_period=0", n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    machine.residency.is_barred = True
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    machine.turn()
    machine.send(UnloadModel("a"))
    machine.residency.is_barred = False
    machine.submit("r", "a", max_tokens=4)
    machine.run("r")
    assert machine.info("a").n_ctx == 512


def test_a_load_that_fails_in_the_next_engine_is_not_what_requests_wait_for(make, refused_forms):
    """SPEC L5: that engine never had the model; it is known as it was before, and requests are served so."""
    machine = make(device_lease=False)
    spec = machine.know("a", ONE.format("back", 500), n_ctx=512, placement=PlacementSpec(gpu_layers="all"))
    refused_forms.add(1024)
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    machine.submit("waits", "a", max_tokens=4)
    machine.run("waits")
    assert machine.info("a").n_ctx == 512
    machine.send(UnloadModel("a"))
    machine.until(lambda: machine.state("a") == "absent")
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    assert refusal(machine, "a").code == "insufficient_memory"
    assert machine.residency._catalogue.get("a").spec == spec
    machine.submit("later", "a", max_tokens=4)
    machine.run("later")
    assert machine.info("a").n_ctx == 512


def test_a_card_without_any_memory_is_tried_once(make, monkeypatch):
    """SPEC R11: what cannot be made less is refused, and not tried for ever."""
    machine, tries = make(device_lease=False), []

    def refused(self, owner, lines):
        tries.append(owner)
        raise InsufficientMemoryError("cudaMalloc failed", needed=MIB, free=0, device="void-1")

    monkeypatch.setattr(FakeDevices, "take", refused)
    machine.load(machine.know("a", ONE.format("void", 0)))
    assert refusal(machine, "a").code == "insufficient_memory"
    assert len(tries) < 5


def test_what_the_settings_say_later_is_not_undone_by_a_load_that_fails(make, refused_forms):
    """SPEC L5, G7: it went for another load, which memory pressure ended; then the settings change."""
    machine = make(device_lease=False)
    machine.have("a", order=ONE.format("back", 500), n_ctx=512, placement=PlacementSpec(gpu_layers="all"))
    spec = machine.residency._catalogue.get("a").spec
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    machine.until(lambda: machine.state("a") != "ready")
    machine.residency.step_aside(0.0)
    machine.send(KnowModel(msgspec.structs.replace(spec, n_ctx=2048)))
    refused_forms.add(2048)
    machine.submit("r", "a", max_tokens=4)
    machine.until(lambda: machine.has_ended("r"))
    assert machine.of(Failed, "r")[-1].error.code == "insufficient_memory"
    assert machine.state("a") == "failed"


def test_a_model_that_cannot_come_back_either_has_failed(make, refused_forms):
    """SPEC L5, R4: it is tried once as it was, and is not tried for ever."""
    machine = make(device_lease=False)
    machine.have("a", order=ONE.format("back", 500), n_ctx=512, placement=PlacementSpec(gpu_layers="all"))
    spec = machine.residency._catalogue.get("a").spec
    refused_forms.update({512, 1024})
    machine.load(msgspec.structs.replace(spec, n_ctx=1024))
    assert refusal(machine, "a").code == "insufficient_memory"
    assert [event.error for event in machine.of(ModelState)].count(None) == len(machine.of(ModelState)) - 1


def test_layers_that_no_device_is_there_for_are_told(make):
    """SPEC R11: a driver that has gone costs speed; who asked for a device sees it."""
    machine = make(device_lease=False)
    no_card = "on the CPU: there is no device for its layers"
    asked = {
        "all": (PlacementSpec(gpu_layers="all"), [no_card]),
        "some": (PlacementSpec(gpu_layers=4), [no_card]),
        "auto": (PlacementSpec(), []),
        "none": (PlacementSpec(gpu_layers="all", device=("none",)), []),
        "zero": (PlacementSpec(gpu_layers=0), []),
    }
    for model, (placement, degraded) in asked.items():
        machine.have(model, order="eog_period=0", placement=placement)
        assert machine.info(model).degraded == degraded
    machine.have("card", order=ONE.format("there", 500), placement=PlacementSpec(gpu_layers="all"))
    assert machine.info("card").degraded == []


def test_a_load_that_fails_for_want_of_memory_is_tried_with_less(make, monkeypatch):
    """SPEC R11: an estimate may be too small; what others took meanwhile is not known before."""
    machine = make(device_lease=False)
    take, tries = FakeDevices.take, []

    def taken(self, owner, lines):
        tries.append(sum(lines.get("tight-1", {}).values()) // MIB)
        if tries[-1] > 150:
            raise InsufficientMemoryError("cudaMalloc failed", needed=MIB, free=0, device="tight-1")
        take(self, owner, lines)

    monkeypatch.setattr(FakeDevices, "take", taken)
    machine.have("a", order=ONE.format("tight", 500))
    assert tries[0] >= 300
    assert tries[-1] <= 150
    assert "layers on tight-1" in machine.info("a").degraded[0]


@pytest.mark.parametrize("kind", ["all", 4])
def test_tries_with_less_end(make, monkeypatch, kind):
    """SPEC R11: what was asked for is not made less; in the end it is refused."""
    machine = make(device_lease=False)

    def refused(self, owner, lines):
        if lines:
            raise InsufficientMemoryError("cudaMalloc failed", needed=MIB, free=0, device="never-1")

    monkeypatch.setattr(FakeDevices, "take", refused)
    machine.load(machine.know("a", ONE.format("never", 1000), placement=PlacementSpec(gpu_layers=kind)))
    error = refusal(machine, "a")
    assert (error.code, error.details["device"]) == ("insufficient_memory", "never-1")


def test_a_step_that_its_device_has_no_memory_for_is_computed_in_parts(make):
    """SPEC R12: halves of its sequences, then of its tokens; what was asked is answered all the same."""
    machine, prompt = make(), "some text that is longer than the parts"
    machine.have("a", order="eog_period=0,most_tokens=3")
    for name in ("r", "s"):
        machine.submit(name, "a", prompt=prompt)
    machine.run("r", "s")
    alone = make.alone(prompt=prompt).tokens
    assert [machine.output(name).tokens for name in ("r", "s")] == [alone, alone]


def test_a_step_without_memory_has_an_error_of_its_own():
    """SPEC R12: an own code and status, so that it may be sent again; it changed nothing."""
    backend = FakeBackend(num_sequences=1, faults=FakeFaults(most_tokens=1))
    with pytest.raises(StepMemoryError) as caught:
        backend.launch(BatchPlan((PlanItem(0, 0, [1, 2], 1),)))
    assert (caught.value.code, caught.value.http_status, backend.length(0)) == ("step_out_of_memory", 503, 0)
