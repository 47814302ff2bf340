"""What the fake backend is ordered to do: failures, latency, sizes, devices, the class of model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.backends.fake.devices import NO_DEVICES, FakeDevices
from stoker.backends.fake.devices import ORDERS as DEVICE_ORDERS
from stoker.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFaults:
    """Failures to order, and the class of model.

    Attributes:
        is_async: a step is computed when its rows are asked for, and nothing else may be called before.
        aborts: steps can be ended from outside.
        draws: it gives the largest logits of a row in place of the row.
        recurrent: it cannot go back or share, and begins from initial states, as a recurrent model.
        bad_sequences: a step that holds one of these raises StepFailedError.
        most_tokens: a step of more tokens raises StepMemoryError; 0: none does.
        bad_tokens: a step that holds one of these tokens raises StepFailedError.
        abort_tokens: a step that holds one of these tokens aborts the process, as native code would.
        bus_tokens: a step that holds one of these tokens ends the process as an unreadable page would.
        step_delay_s: seconds every step, and every slice of an image, takes; of an asynchronous model from
            the launch on, whatever is done meanwhile.
        token_delay_s: seconds that each token of a step adds to that.
        eog_period: about one position in so many wants to end the text; 0: none does.
        load_s: seconds a load takes.
        load_aborts: a load aborts the process before it says how far it is, with a word on stderr.
        load_fails: a load ends with ModelLoadError.
        vision: slices that encoding an image takes; 0: it takes no images.
        hearing: slices that encoding a recording takes; 0: it takes none. With both, the larger holds.
        shift: by how much the ids of bytes are further than those of other fakes: another vocabulary.
        script: file of the answers that it gives word for word; see `script`.
        weights_mib, cell_kib: what it claims to take: weights, and a cell.
        devices: what it is as if computed on, and takes memory of.
    """

    bad_sequences: frozenset[int] = frozenset()
    most_tokens: int = 0
    bad_tokens: frozenset[int] = frozenset()
    abort_tokens: frozenset[int] = frozenset()
    bus_tokens: frozenset[int] = frozenset()
    step_delay_s: float = 0.0
    token_delay_s: float = 0.0
    eog_period: int = 256
    is_async: bool = False
    aborts: bool = False
    draws: bool = False
    recurrent: bool = False
    load_s: float = 0.0
    load_fails: bool = False
    load_aborts: bool = False
    vision: int = 0
    hearing: int = 0
    script: str = ""
    shift: int = 0
    weights_mib: int = 0
    cell_kib: float = 1 / 128
    devices: FakeDevices = NO_DEVICES

    @classmethod
    def parse(cls, text: str) -> FakeFaults:
        """Faults written as "abort_tokens=7+9,step_delay_s=0.01". Raises ModelFileError."""
        orders = dict(part.partition("=")[::2] for part in text.split(",")) if text else {}
        faults: dict[str, Any] = {"devices": FakeDevices.parse(orders)}
        for name, value in orders.items():
            try:
                match name:
                    case "id":
                        pass  # under which it is served
                    case _ if name in DEVICE_ORDERS:
                        pass  # parsed above
                    case "step_delay_s" | "token_delay_s" | "load_s" | "cell_kib":
                        faults[name] = float(value)
                    case "script":
                        faults[name] = value
                    case "eog_period" | "weights_mib" | "shift" | "vision" | "hearing" | "most_tokens":
                        faults[name] = int(value)
                    case "recurrent" | "is_async" | "aborts" | "draws" | "load_fails" | "load_aborts":
                        faults[name] = bool(int(value))
                    case "bad_sequences" | "bad_tokens" | "abort_tokens" | "bus_tokens":
                        faults[name] = frozenset(int(number) for number in value.split("+"))
                    case _:
                        raise ModelFileError(f"the fake backend knows no fault {name!r}")
            except ValueError as error:
                raise ModelFileError(f"{value!r} is no value for the fault {name!r}") from error
        return cls(**faults)
