"""What the lines mean: ratios of Stoker to the others, the bars beside them, and which hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from bench.device.contestants import LIMIT, PEER, PEER_ON_DEVICE, STOKER
from bench.tables import STYLES, VERDICTS, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.device.lines import Lines

LARGE_BYTES = 6_000_000_000
"""A model of more has the bar of the larger one."""
LIMIT_BARS = {"single": 0.93, "fan8": 0.85}
LIMIT_BAR_64 = {False: 0.7, True: 0.8}
"""By whether the model is large."""
LONG_BAR = 0.9
INTERACTIVE_BAR_S = 0.1
START_BAR = 1.3
CRASH_BAR = 1.5
PAIR_BAR = 1.9


@dataclass(frozen=True, slots=True)
class Against:
    """Another's value, how many times better Stoker is, and the bar of that.

    Attributes:
        ratio: above 1: Stoker is better; None: one of them was not measured.
        bar: None: it is shown only.
    """

    value: float | None
    ratio: float | None
    bar: float | None

    @property
    def is_good(self) -> bool | None:
        """Whether the bar is reached; None: there is none, or nothing to hold against it."""
        return None if self.bar is None or self.ratio is None else self.ratio >= self.bar

    @property
    def ratio_text(self) -> str:
        """The ratio with its bar, behind a space; empty: there is none."""
        if self.ratio is None:
            return ""
        return f" {self.ratio:.2f}" + ("" if self.bar is None else f"≥{self.bar:.2g}")

    def __str__(self) -> str:
        return "" if self.value is None else number(self.value) + self.ratio_text


@dataclass(frozen=True, slots=True)
class Judged:
    """One row of the table.

    Attributes:
        own: Stoker's value.
        against: by the other's name; STOKER: what it reaches elsewhere.
        own_bar: seconds that it may take; None: no bar of its own.
    """

    title: str
    own: float | None
    against: dict[str, Against]
    own_bar: float | None = None

    @property
    def is_good(self) -> bool | None:
        """Whether every bar holds; None where none could be judged."""
        found = [each.is_good for each in self.against.values() if each.is_good is not None]
        if self.own_bar is not None and self.own is not None:
            found.append(self.own <= self.own_bar)
        return all(found) if found else None

    @property
    def cells(self) -> list[str]:
        """As the table shows it."""
        bar = "" if self.own_bar is None else f"≤{self.own_bar:g}"
        elsewhere = self.against.get(STOKER)
        own = "" if self.own is None else number(self.own) + bar
        own += elsewhere.ratio_text if elsewhere else ""
        others = [str(self.against.get(name, "")) for name in (PEER, PEER_ON_DEVICE, LIMIT)]
        return [self.title, own, *others, VERDICTS[self.is_good]]


def judged(lines: Lines, model: str) -> list[Judged]:
    """Every row of a model for which Stoker or another was measured."""
    found = [*_crowds(lines, model), *_delays(lines, model), *_own(lines, model)]
    return [each for each in found if each.own is not None or _has_value(each)]


def _has_value(row: Judged) -> bool:
    return any(each.value is not None for each in row.against.values())


def _crowds(lines: Lines, model: str) -> Iterator[Judged]:
    is_large = (lines.value(model, "", "file", "size_bytes") or 0) > LARGE_BYTES
    limit_bars = {**LIMIT_BARS, "fan64": LIMIT_BAR_64[is_large]}
    for row in lines.rows(model):
        group, _, way = row.partition("-")
        if way not in {"greedy", "sampled"} or group == "long":
            continue
        own = lines.value(model, STOKER, row, "tokens_per_s")
        on_device_bar = 1.0 if group == "single" else 1.1
        bars = ((PEER, row, 1.0), (PEER_ON_DEVICE, row, on_device_bar), (LIMIT, group, limit_bars.get(group)))
        yield Judged(
            row,
            own,
            {
                server: _higher(own, lines.value(model, server, name, "tokens_per_s"), bar)
                for server, name, bar in bars
            },
        )


def _delays(lines: Lines, model: str) -> Iterator[Judged]:
    largest = _largest_greedy(lines, model)
    crowd = largest.partition("-")[0]
    shown = [
        (largest, "first_p50_s", f"{crowd} p50, s", 1.0),
        (largest, "first_p95_s", f"{crowd} p95, s", None),
        ("prefill", "first_p95_s", "prefill p95, s", 1.0),
        ("start", "ready_s", "start, s", 1 / START_BAR),
    ]
    for row, name, title, bar in shown:
        own = lines.value(model, STOKER, row, name)
        against = {
            server: _lower(own, lines.value(model, server, row, name), bar if server == PEER else None)
            for server in (PEER, PEER_ON_DEVICE)
        }
        yield Judged(title, own, against)


def _own(lines: Lines, model: str) -> Iterator[Judged]:
    """What is held against Stoker itself, or a start."""
    yield Judged(
        "interactive, s",
        lines.value(model, STOKER, "interactive", "first_p95_s"),
        {},
        INTERACTIVE_BAR_S,
    )
    gap_s = lines.value(model, STOKER, "crash", "gap_s")
    start_s = lines.value(model, PEER, "start", "ready_s")
    yield Judged("crash, s", gap_s, {PEER: _lower(gap_s, start_s, 1 / CRASH_BAR)})
    for title, row, other, name, bar in (
        ("long of short", "long-greedy", _largest_greedy(lines, model), "steady_tokens_per_s", LONG_BAR),
        ("pair of one", "pair-both", "pair-one", "tokens_per_s", PAIR_BAR),
        ("gate of one", "gate-both", "gate-direct", "tokens_per_s", PAIR_BAR),
        ("split single", "split-single", "", "tokens_per_s", None),
        ("split fan8", "split-fan8", "", "tokens_per_s", None),
    ):
        own = lines.value(model, STOKER, row, name)
        compared = lines.value(model, STOKER, other, name) if own is not None else None
        yield Judged(title, own, {STOKER: _higher(own, compared, bar)})


def _largest_greedy(lines: Lines, model: str) -> str:
    crowds = [row for row in lines.rows(model) if row.startswith("fan") and row.endswith("-greedy")]
    return max(crowds, key=lambda row: int(row.removeprefix("fan").partition("-")[0]), default="")


def _higher(own: float | None, other: float | None, bar: float | None) -> Against:
    return Against(other, own / other if own is not None and other else None, bar)


def _lower(own: float | None, other: float | None, bar: float | None) -> Against:
    return Against(other, other / own if own and other is not None else None, bar)


def table_of(lines: Lines, model: str) -> Table:
    """The table of one model, for a terminal of 80 columns."""
    title = f"{model}: tokens a second, or s; a ratio above 1 is better"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, head in enumerate(("", STOKER, PEER, "own sampling", LIMIT, "")):
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in judged(lines, model):
        table.add_row(*row.cells, style=STYLES[row.is_good])
    return table
