"""Accelerators as if: with memory that models of this process take, another program's use, and an end.

"device=A+B" orders two cards of a gigabyte each, "device_mib=1024+512" their sizes and "others_mib=100+0"
what another program holds of them. "others=FILE" is read anew at each look instead: what stands there
("100 0") is what others hold now, and "gone" in the place of a number is a card that is no longer there.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.backends.device import CPU, Device, DeviceMemory
from stoker.errors import InsufficientMemoryError, ModelFileError
from stoker.ipc.model import ANYWHERE, NO_DEVICE
from stoker.models.memory_estimate.shares import places
from stoker.models.placement import chosen_devices
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.ipc.model import PlacementSpec

ORDERS = frozenset({"device", "device_mib", "others_mib", "others"})
_DEFAULT_MIB = 1024
NUM_LAYERS = 9
"""Of a fake model, as a placement counts them."""
_MIB = 2**20
_GONE = "gone"


class FakeCard:
    """What the models of this process hold of one card; freed with the last reference to whoever took it.

    Args:
        name: cards of one name are one card.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<FakeCard {self.name} {self.held_bytes}>"

    @property
    def held_bytes(self) -> int:
        """All that is taken."""
        with self._lock:
            return sum(self._held.values())

    def hold(self, owner: object, size_bytes: int) -> None:
        """Have `owner` hold so much of it; 0 gives back what it had."""
        with self._lock:
            self._held[owner] = size_bytes


@cache
def card_of(name: str) -> FakeCard:
    """The one card of a name."""
    return FakeCard(name)


@dataclass(frozen=True, slots=True)
class FakeDevices:
    """The cards of a model's orders; none: it is computed on the CPU.

    Attributes:
        names: of the cards.
        total_mib: of each.
        others_mib: what others hold of each.
        others: file that says the same, read at each look; empty: there is none.
    """

    names: tuple[str, ...] = ()
    total_mib: tuple[int, ...] = ()
    others_mib: tuple[int, ...] = ()
    others: str = ""

    @classmethod
    def parse(cls, orders: Mapping[str, str]) -> FakeDevices:
        """Those that are ordered. Raises ModelFileError for numbers that are none, or not one a card."""
        names = tuple(orders["device"].split("+")) if orders.get("device") else ()
        return cls(
            names,
            _numbers(orders.get("device_mib", ""), names, _DEFAULT_MIB),
            _numbers(orders.get("others_mib", ""), names, 0),
            orders.get("others", ""),
        )

    def label(self, placement: PlacementSpec = ANYWHERE) -> str:
        """What computes, for people."""
        return " + ".join(device.name for device in self.used(placement)) or CPU.label

    def used(self, placement: PlacementSpec) -> tuple[Device, ...]:
        """The cards that a model so placed lies on. Raises InvalidRequestError for one that is not there."""
        return chosen_devices(placement, self.cards())

    def devices(self) -> tuple[Device, ...]:
        """Those that are there, or the CPU."""
        return self.cards() or (CPU,)

    def cards(self) -> tuple[Device, ...]:
        """The accelerators that are there."""
        return tuple(
            Device(name, "Fake", id=name, index=index, lock=name, read=partial(self._memory, index))
            for index, name in enumerate(self.names)
            if self._others_bytes(index) is not None
        )

    def take(self, owner: object, lines: Mapping[str, Mapping[str, int]]) -> None:
        """Have `owner` hold these bytes by card and line.

        Raises:
            InsufficientMemoryError: a card has not so much; nothing is held then.
        """
        for device in self.cards():
            wanted, memory = sum(lines.get(device.id, {}).values()), device.memory()
            free_bytes = memory.free_bytes if memory else 0
            if wanted > free_bytes:
                self.release(owner)
                raise InsufficientMemoryError(
                    f"the fake card {device.name} is out of memory: {size_text(wanted)} asked for,"
                    f" {size_text(free_bytes)} free",
                    needed=wanted,
                    free=free_bytes,
                    device=device.id,
                )
            card_of(device.name).hold(owner, wanted)

    def release(self, owner: object) -> None:
        """Give back what `owner` holds; idempotent."""
        for name in self.names:
            card_of(name).hold(owner, 0)

    def meet_loss(self, lines: Mapping[str, object]) -> None:
        """Abort the process, as native code does, where one of these cards is no longer there."""
        there = {device.id for device in self.cards()}
        for name in lines:
            if name not in there:
                os.write(
                    2, f"Fake error: the card is gone\n  current device: {name}, in function step\n".encode()
                )
                os.abort()

    def share(
        self, lines: Mapping[str, int], placement: PlacementSpec = ANYWHERE
    ) -> dict[str, dict[str, int]]:
        """What of these lines is on each card: in equal parts where `placement` is "auto", else by layers."""
        cards = self.used(placement)
        parts = [1 / len(cards) for _ in cards]
        if placement.gpu_layers != "auto":
            ids = tuple(device.id for device in cards)
            where = places(replace(placement, device=ids or (NO_DEVICE,)), NUM_LAYERS)
            parts = [where.count(device) / NUM_LAYERS for device in ids]
        shares = {name: _dealt(size_bytes, parts) for name, size_bytes in lines.items()}
        return {
            device.id: {name: shares[name][at] for name in lines}
            for at, device in enumerate(cards)
            if parts[at]
        }

    def _memory(self, index: int) -> DeviceMemory | None:
        total_bytes, others_bytes = self.total_mib[index] * _MIB, self._others_bytes(index)
        if others_bytes is None:
            return None
        taken_bytes = others_bytes + card_of(self.names[index]).held_bytes
        return DeviceMemory(max(0, total_bytes - taken_bytes), total_bytes)

    def _others_bytes(self, index: int) -> int | None:
        """What others hold of a card now; None: it is gone."""
        if not self.others:
            return self.others_mib[index] * _MIB
        try:
            words = Path(self.others).read_text(encoding="ascii").split()
            return None if words[index] == _GONE else int(words[index]) * _MIB
        except (OSError, ValueError, IndexError) as error:
            raise ModelFileError(f"{self.others} does not say what others hold: {error}") from None


NO_DEVICES = FakeDevices()


def _numbers(text: str, names: tuple[str, ...], default: int) -> tuple[int, ...]:
    if not text:
        return (default,) * len(names)
    parts = text.split("+")
    if len(parts) != len(names) or not all(part.isdecimal() for part in parts):
        raise ModelFileError(f"{text!r} is not a number of MiB for each of {len(names)} fake devices")
    return tuple(map(int, parts))


def _dealt(size_bytes: int, parts: Sequence[float]) -> list[int]:
    """Those fractions of it, which add up exactly."""
    ends = [round(size_bytes * end) for end in accumulate(parts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
