"""Which settings are quickest: one after the other, in trials that take turns. Pure but for what measures.

The values of a setting are tried in rounds, every other round in reverse, so that a machine that gets
slower meanwhile (heat, other programs) is slower for all of them. What is not quicker by more than trials
of the same value differ by changes nothing. At the end all that was chosen stands once more against the
defaults.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.errors import StokerError

ROUNDS = 3
LEAST_GAIN = 0.03
"""Less is nothing that one would notice."""
HOPELESS = 1.3
"""A value that takes this much longer than the best of the first round is not tried again."""

Value = int | str | None
"""Of a setting; None: its default."""
Choices = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class TrialTime:
    """One trial: seconds of one whole request, and tokens a second of its answer."""

    seconds: float
    tokens_per_s: float


Measure = Callable[[Choices], Awaitable[TrialTime]]
"""Runs one trial with these settings, the others at their defaults. Raises StokerError."""


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """One setting and the values to try beside its default."""

    name: str
    values: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ToldTrial:
    """One trial, for those who show progress.

    Attributes:
        name, value: the setting that is tried; empty: everything that was chosen, against the defaults.
        number: of how many there may be.
        found: what was measured; None: it could not be run, which `error` says.
    """

    name: str
    value: Value
    number: int
    most: int
    found: TrialTime | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Quickest:
    """What is quickest; `default` and `best` are the medians of the last rounds."""

    settings: dict[str, int | str]
    default: TrialTime
    best: TrialTime
    refused: dict[str, str] = field(default_factory=dict)


def most_trials(dimensions: Sequence[TriedSetting], rounds: int = ROUNDS) -> int:
    """So many there are at most."""
    return rounds * (sum(len(each.values) + 1 for each in dimensions) + 2)


class SettingsSearch:
    """Trials of one model.

    Args:
        dimensions: what is tried.
        measure: runs a trial.
        on_trial: told of each.
        rounds: of each setting.
    """

    def __init__(
        self,
        dimensions: Sequence[TriedSetting],
        measure: Measure,
        on_trial: Callable[[ToldTrial], None],
        rounds: int = ROUNDS,
    ) -> None:
        self._dimensions = tuple(dimensions)
        self._measure = measure
        self._on_trial = on_trial
        self._rounds = rounds
        self._num_trials = 0
        self._refused: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<SettingsSearch over {[each.name for each in self._dimensions]}, {self._num_trials} trials>"

    async def run(self) -> Quickest:
        """All of them; raises what the first trial of the defaults raises."""
        chosen: dict[str, int | str] = {}
        for each in self._dimensions:
            values: dict[Value, dict[str, int | str]] = {None: dict(chosen)}
            values |= {value: chosen | {each.name: value} for value in each.values}
            best = _quickest(await self._compare(each.name, values))
            chosen = values[best]
        if not chosen:
            found = _median((await self._compare("", {None: {}}))[None])
            return Quickest({}, found, found, self._refused)
        both = await self._compare("", {None: {}, "chosen": chosen})
        is_quicker = _quickest(both) == "chosen"
        best_samples = both["chosen"] if is_quicker else both[None]
        settings = chosen if is_quicker else {}
        return Quickest(settings, _median(both[None]), _median(best_samples), self._refused)

    async def _compare(self, name: str, forms: Mapping[Value, Choices]) -> dict[Value, list[TrialTime]]:
        """What each form took, in rounds; those that cannot be run or are hopeless are left out early."""
        samples: dict[Value, list[TrialTime]] = {value: [] for value in forms}
        for number in range(self._rounds):
            order = list(samples)
            for value in reversed(order) if number % 2 else order:
                found = await self._try(name, value, forms[value])
                if found is None:
                    del samples[value]
                else:
                    samples[value].append(found)
            least = min(each[0].seconds for each in samples.values())
            samples = {
                value: each
                for value, each in samples.items()
                if value is None or each[0].seconds <= HOPELESS * least
            }
        return samples

    async def _try(self, name: str, value: Value, choices: Choices) -> TrialTime | None:
        self._num_trials += 1
        most = most_trials(self._dimensions, self._rounds)
        try:
            found = await self._measure(choices)
        except StokerError as error:
            if value is None:
                raise
            self._refused[f"{name} {value}"] = error.message
            self._on_trial(ToldTrial(name, value, self._num_trials, most, error=error.message))
            return None
        self._on_trial(ToldTrial(name, value, self._num_trials, most, found))
        return found


def _quickest(samples: Mapping[Value, Sequence[TrialTime]]) -> Value:
    """The value that is quicker than the default by more than the noise; else the default."""
    default = [each.seconds for each in samples[None]]
    best = min(samples, key=lambda value: statistics.median(each.seconds for each in samples[value]))
    times = [each.seconds for each in samples[best]]
    noise = max(LEAST_GAIN, _spread(default), _spread(times))
    gain = 1.0 - statistics.median(times) / statistics.median(default)
    return best if gain > noise else None


def _spread(times: Sequence[float]) -> float:
    """How far trials of one value lie apart, as a part of their middle."""
    return (max(times) - min(times)) / statistics.median(times)


def _median(samples: Sequence[TrialTime]) -> TrialTime:
    return TrialTime(
        statistics.median(each.seconds for each in samples),
        statistics.median(each.tokens_per_s for each in samples),
    )
