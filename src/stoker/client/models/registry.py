"""The served models: names, states, how each is loaded, how often its load ended the engine.

Owns which models the next engine loads, and the last known state of each. Holds no file and no native handle:
the engine loads, `stoker.client.supervisor` says when.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import ErrorInfo, LoadCrashedError, ModelNotFoundError, error_from_info
from stoker.ipc.commands import KnowModel, LoadModel, UnloadModel
from stoker.ipc.model import CLIENT_MODEL_MOVES, STORY_LENGTH, ModelInfo, ModelLife, is_move
from stoker.ipc.status import ModelStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stoker.client.models.specs import FoundModel
    from stoker.client.process.exit import EngineExit
    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelSpec

log = logging.getLogger(__name__)

MAX_LOAD_CRASHES = 2
MAX_STEP_CRASHES = 2
"""Engines that may end over what runs on a model before another way to serve it is taken, if there is one."""
_NOT_BEGUN = frozenset({"", "waiting"})
"""Stages of a load in which nothing of the file has been touched."""
PASSING = frozenset({"insufficient_memory", "model_too_large", "too_hot", "device_busy"})
"""Codes of refusals for the machine's sake: later, or with less beside it, the model may load."""
_IN_MEMORY = frozenset({ModelLife.LOADING, ModelLife.READY})
UNDER_WAY = frozenset({ModelLife.DOWNLOADING, ModelLife.LOADING, ModelLife.UNLOADING})
"""States that an engine changes by itself."""


def file_mark(path: str) -> object:
    """Size, time of change and place of a file; None if there is none."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(slots=True)
class ModelEntry:
    """One served model.

    Attributes:
        spec: how it is loaded.
        info: what it is; before its first load what its header says.
        asked: another spec that it is being loaded with; becomes `spec` once it is ready.
        asks: loads, as what, and unloads (None), sent or not yet, that no engine has answered, by `ask_id`.
        is_due: a fresh engine has to load it.
        may_evict: idle models may be unloaded for that.
        is_leaving: its unload was asked for, so a fresh engine need not load it.
        is_served: the settings name it, or it was ready once; else a caller wants it loaded, by its name.
        declared: how the settings name it; None: they do not.
        is_withdrawn: the settings named it; it goes when nothing needs it, and newcomers do not find it.
        is_barred: it has failed for good; requests are refused with `error`.
        mark: of the file it was barred for; another file in its place is tried again.
        load_crashes: engines that its loads have ended since it was last in memory.
        trying: the way that is being loaded, by its path and backend.
        step_crashes: engines that ended while requests ran on it as it is served now.
        whole: how it is loaded with all of its ways, where some were given up.
        reload_error: why another load of it, beside the one that serves, was given up.
        story: its last moves, for messages of illegal ones.
    """

    spec: ModelSpec
    info: ModelInfo
    state: ModelLife = ModelLife.ABSENT
    stage: str = ""
    fraction: float = 0.0
    reason: str = ""
    error: ErrorInfo | None = None
    asked: ModelSpec | None = None
    asks: dict[int, ModelSpec | None] = field(default_factory=dict)
    is_due: bool = False
    may_evict: bool = False
    is_leaving: bool = False
    is_served: bool = False
    declared: ModelSpec | None = None
    is_withdrawn: bool = False
    is_barred: bool = False
    mark: object = None
    load_crashes: int = 0
    trying: tuple[str, str] = ("", "")
    step_crashes: int = 0
    whole: ModelSpec | None = None
    reload_error: ErrorInfo | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def is_shown(self) -> bool:
        """Whether it is one of the models; one whose only load failed is none."""
        return not self.is_withdrawn and (self.is_served or self.state is not ModelLife.FAILED)

    @property
    def is_suspect(self) -> bool:
        """Whether its last load has ended an engine."""
        return self.load_crashes > 0

    @property
    def to_load(self) -> ModelSpec:
        """How it is loaded next, or is being loaded now."""
        return self.asked or self.spec

    @property
    def is_settled(self) -> bool:
        """Whether no load or unload of it is under way."""
        return self.state not in UNDER_WAY

    @property
    def is_to_change(self) -> bool:
        """Whether it is served, and is being loaded otherwise now."""
        return self.is_served and self.asked is not None and self.asked.as_loaded != self.spec.as_loaded

    def is_ready_as(self, spec: ModelSpec) -> bool:
        """Whether it is in memory just so, and neither leaving nor about to be replaced."""
        is_staying = self.state is ModelLife.READY and not self.is_leaving
        return is_staying and self.asked is None and self.spec == spec

    def loses_by(self, spec: ModelSpec) -> bool:
        """Whether requests for it would find less context, or another file, if it were loaded so."""
        now_n_ctx = self.spec.most_tokens or math.inf
        return spec.path != self.spec.path or (spec.most_tokens or math.inf) < now_n_ctx

    def pass_on(self, path: str, backend: str, why: str) -> bool:
        """Give up one way to serve it; returns whether another is left, which is taken from now on."""
        given_up = self.to_load.way_of(path, backend)
        left = self.to_load.without(given_up, f"{backend}: {why}")
        if left is None:
            return False
        log.warning("%s is served otherwise from now on, as %s: %s", self.spec.id, given_up.served_by, why)
        self.whole = self.whole or self.to_load
        self.load_crashes = self.step_crashes = 0
        if self.asked is not None:
            self.asked = left
        else:
            self.spec = left
        return True

    @property
    def way(self) -> ModelInfo | None:
        """What serves it, where it can be served in several ways; None: there is one only."""
        is_one = not (self.spec.fallbacks or self.spec.passed_over or self.whole)
        return None if is_one else self.info

    def charge_step(self, ended: EngineExit) -> None:
        """An engine has ended while requests ran on it."""
        self.step_crashes += 1
        if self.step_crashes >= MAX_STEP_CRASHES:
            text = f"it ended the engine {self.step_crashes} times, last: {ended.quoted}"
            self.pass_on(self.info.path, self.info.backend, text)

    def take_back(self) -> None:
        """All of its ways may be tried again."""
        self.step_crashes = 0
        if self.whole is not None and self.asked is None:
            self.spec = self.whole.with_own(self.spec)
        self.whole = None

    def can_move(self, to: ModelLife) -> bool:
        """Whether the table has that move, or it is none."""
        return is_move(self.state, to, CLIENT_MODEL_MOVES)

    def move(self, to: ModelLife) -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, told with the story so far.
        """
        if not self.can_move(to):
            raise AssertionError(f"{self.spec.id} is {self.state} and cannot become {to}; {self.told}")
        self.set(to)

    def set(self, to: ModelLife) -> None:
        """Take a state that the engine reports, whatever the table says."""
        if self.state is not to:
            self.story.append(str(to))
        self.state = to
        self.stage, self.fraction, self.reason, self.error = "", 0.0, "", None

    @property
    def told(self) -> str:
        """Its last moves, for messages."""
        return f"story: {'; '.join(self.story)}"


class ModelRegistry:
    """All served models, in order; the first is the default.

    Args:
        models: ids are unique. The first engine loads all of them, the first one first.
        mark_of: tells the file at a path from another that takes its place.
    """

    def __init__(self, models: Iterable[FoundModel], mark_of: Callable[[str], object] = file_mark) -> None:
        self._mark_of = mark_of
        self._last_ask_id = 0
        self._entries: dict[str, ModelEntry] = {}
        for spec, info, is_due in models:
            entry = self._entries[spec.id] = ModelEntry(spec, info, is_served=True, declared=spec)
            entry.is_due = is_due
            entry.may_evict = len(self._entries) == 1

    def __repr__(self) -> str:
        return f"<ModelRegistry {self.stats()}>"

    # ------------------------------------------------------------ questions

    def stats(self) -> dict[str, str]:
        """State of each model by id."""
        return {model: str(entry.state) for model, entry in self._entries.items()}

    def state(self, model: str) -> ModelLife:
        """State of a model; absent: there is none of that id."""
        entry = self._entries.get(model)
        return entry.state if entry else ModelLife.ABSENT

    def get(self, model: str) -> ModelEntry | None:
        """A model by its id, as it stands, one that is barred too; changed by this class only."""
        entry = self._entries.get(model)
        return entry if entry and (entry.is_shown or entry.is_barred) else None

    def known(self) -> list[KnowModel]:
        """What a fresh engine has to know: all of them, as the file of one that failed may be replaced."""
        return [KnowModel(entry.spec, entry.is_suspect) for entry in self._entries.values()]

    def infos(self) -> list[ModelInfo]:
        """Of every model that has not failed for good, the default first."""
        return [entry.info for entry in self._entries.values() if entry.is_shown and not entry.is_barred]

    def num_slots(self, model: str) -> int:
        """Sequences that a model runs at once, as far as is known; 0 for one that is not served."""
        entry = self._entries.get(model)
        return entry.info.num_slots if entry else 0

    def resolve(self, model: str | None) -> ModelInfo:
        """The model a request names, itself or by one of its adapters; None and "default" mean the first.

        Raises:
            ModelNotFoundError: no such model is served.
            ModelError: it has failed for good.
        """
        named = next(iter(self._entries), None) if model in {None, "default"} else model
        entry = (self.get(named) or self._aliased(named)) if named is not None else None
        adapter = "" if entry or named is None else named
        if adapter:
            entry = self._adapted(adapter)
        if entry is None:
            raise self.not_served(model)
        self._forgive_replaced(entry)
        if entry.is_barred and entry.error:
            raise error_from_info(entry.error)
        return msgspec.structs.replace(entry.info, adapter=adapter) if adapter else entry.info

    def not_served(self, model: str | None) -> ModelNotFoundError:
        """The refusal of a model that is not served; it names those that are."""
        served = ", ".join(model for model, entry in self._entries.items() if entry.is_shown) or "none"
        return ModelNotFoundError(f"no model {model!r} is served; served: {served}", param="model")

    def _aliased(self, alias: str) -> ModelEntry | None:
        """The model that has that further name."""
        shown = (entry for entry in self._entries.values() if entry.is_shown)
        return next((entry for entry in shown if alias in entry.spec.aliases), None)

    def _adapted(self, adapter: str) -> ModelEntry | None:
        """The model that has an adapter of that name."""
        having = (
            entry
            for entry in self._entries.values()
            if entry.is_shown and any(spec.name == adapter for spec in entry.info.adapters)
        )
        return next(having, None)

    def failure(self, model: str) -> ErrorInfo | None:
        """Why a model cannot be used any more, or None."""
        entry = self._entries.get(model)
        return entry.error if entry and entry.is_barred else None

    def load_failure(self, model: str) -> ErrorInfo | None:
        """Why the next engine will not load what was asked for; None: it will."""
        entry = self._entries.get(model)
        return (self.failure(model) or entry.reload_error) if entry else None

    def start_failure(self) -> ErrorInfo | None:
        """Why a first start has to fail, or None.

        A broken file or a crash always is a reason; a refusal for want of memory or for heat is one where it
        leaves nothing to serve.
        """
        failed = [e.error for e in self._entries.values() if e.state is ModelLife.FAILED and e.error]
        broken = [error for error in failed if error.code not in PASSING]
        if broken or not failed:
            return broken[0] if broken else None
        is_any_ready = any(entry.state is ModelLife.READY for entry in self._entries.values())
        return None if is_any_ready else failed[0]

    def statuses(self, leases: Mapping[str, int]) -> list[ModelStatus]:
        """Every model as last reported; `leases` are live requests by model."""
        shown = [(model, entry) for model, entry in self._entries.items() if entry.is_shown]
        return [_status(entry, leases.get(model, 0)) for model, entry in shown]

    # ------------------------------------------------------------ what callers want

    def call_off(self, model: str, *, for_requests: bool = False) -> LoadModel | None:
        """Give up a load otherwise; returns the command to go back to the former. None: there was none.

        `for_requests`: only one that would take context or the file from them.
        """
        entry = self._entries[model]
        if entry.asked is None or not (entry.loses_by(entry.asked) if for_requests else entry.is_to_change):
            return None
        entry.asked, entry.may_evict = None, True
        return self._load_of(entry)

    def ask(self, spec: ModelSpec, info: ModelInfo) -> LoadModel:
        """A caller wants `spec` in memory; returns the command for an engine that serves.

        Without one, the next engine loads it.
        """
        entry = self._entries.get(spec.id)
        if entry is None:
            entry = self._entries[spec.id] = ModelEntry(spec, info)
        if not entry.is_served:
            entry.info = info
        self._forgive_replaced(entry)
        if entry.is_barred:  # once more, as it was asked for
            entry.is_barred, entry.load_crashes = False, MAX_LOAD_CRASHES - 1
        entry.asked, entry.reload_error = spec, None
        entry.step_crashes, entry.whole = 0, None
        entry.is_due = entry.may_evict = True
        entry.is_leaving = False
        if entry.state not in {ModelLife.READY, ModelLife.UNLOADING}:  # else it serves on meanwhile (SPEC L5)
            entry.move(ModelLife.LOADING)
        return self._load_of(entry)

    def serve(self, spec: ModelSpec, info: ModelInfo) -> KnowModel:
        """Serve a model that no settings name, without a load; returns the command for an engine that serves.

        The first request for it loads it.
        """
        entry = self._entries.setdefault(spec.id, ModelEntry(spec, info))
        if entry.is_settled and entry.state is not ModelLife.READY:
            entry.spec, entry.info = spec, info
        entry.is_served, entry.is_withdrawn = True, False
        return KnowModel(entry.spec, entry.is_suspect)

    def release(self, model: str, tell: Callable[[UnloadModel], bool]) -> bool:
        """A caller wants it out of memory: no engine has to load it. Returns whether `tell` reaches one."""
        entry = self._entries[model]
        entry.is_due, entry.is_leaving, entry.asked = False, True, None
        is_held = tell(UnloadModel(model, self._open_ask(entry, None)))
        if not is_held:
            entry.asks.clear()
        if entry.state is ModelLife.SUSPENDED or (entry.state in _IN_MEMORY | UNDER_WAY and not is_held):
            entry.move(ModelLife.ABSENT)
        return is_held

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """Set whether it is never unloaded to make room."""
        entry = self._entries[model]
        entry.spec = msgspec.structs.replace(entry.spec, is_pinned=is_pinned)
        if entry.asked is not None:
            entry.asked = msgspec.structs.replace(entry.asked, is_pinned=is_pinned)

    # ------------------------------------------------------------ what the settings want

    def take(self, models: Sequence[FoundModel]) -> tuple[list[FoundModel], list[str]]:
        """Serve the models of the settings, the default first, and withdraw what they no longer name.

        What needs no other load holds at once. Where the settings say of a model what they said before, a
        load that a caller asked for otherwise stays. Withdrawn models are not found by requests; those that
        they have go on.

        Returns:
            Models to load, and the withdrawn ones, to be unloaded.
        """
        named = {model.spec.id: model for model in models}
        to_load = [model for model in models if self._declare(model)]
        gone = [
            name for name, e in self._entries.items() if name not in named and (e.declared or e.is_withdrawn)
        ]
        for name in gone:
            entry = self._entries[name]
            entry.declared, entry.is_due, entry.is_withdrawn = None, False, True
        self._entries = {name: self._entries[name] for name in (*named, *self._entries)}
        return to_load, gone

    def _declare(self, model: FoundModel) -> bool:
        """Serve a model as the settings name it now; returns whether it has to be loaded so."""
        spec, info, is_due = model
        entry = self._entries.get(spec.id)
        if entry is None:
            self._entries[spec.id] = ModelEntry(spec, info, is_served=True, declared=spec)
            return is_due
        before, entry.declared = entry.declared, spec
        entry.is_served, entry.is_withdrawn = True, False
        has_changed = before is None or before.as_loaded != spec.as_loaded
        entry.spec = entry.spec.with_own(spec)
        if entry.asked is not None:
            entry.asked = entry.asked.with_own(spec)
        if has_changed and entry.asked is None and entry.state not in _IN_MEMORY | UNDER_WAY:
            entry.spec, entry.info, entry.is_barred = spec, info, False
            return False
        entry.info = entry.info.served_as(entry.spec)
        return has_changed

    def forget(self, model: str) -> None:
        """A withdrawn model is not in memory any more."""
        if self._entries[model].is_withdrawn:
            del self._entries[model]

    # ------------------------------------------------------------ what engines do

    def next_due(self, *, skips_suspects: bool = False) -> LoadModel | None:
        """What a starting engine has to load next; its state becomes `loading`.

        Args:
            skips_suspects: leave out what has ended an engine: others wait for this one.
        """
        for entry in self._entries.values():
            if entry.is_due and not (entry.is_barred or (skips_suspects and entry.is_suspect)):
                is_reload = entry.state is ModelLife.READY  # asked for otherwise while this engine loaded it
                return self._load_of(entry) if is_reload else self._begin_load(entry)
        return None

    def suspects_due(self) -> list[LoadModel]:
        """What has ended an engine, for one that serves already; the state of each becomes `loading`."""
        due = [e for e in self._entries.values() if e.is_due and e.is_suspect and not e.is_barred]
        return [self._begin_load(entry) for entry in due]

    def _begin_load(self, entry: ModelEntry) -> LoadModel:
        entry.move(ModelLife.LOADING)
        return self._load_of(entry)

    def _load_of(self, entry: ModelEntry) -> LoadModel:
        ask_id = self._open_ask(entry, entry.to_load)
        return LoadModel(entry.to_load, entry.may_evict, entry.is_suspect, ask_id)

    def _open_ask(self, entry: ModelEntry, spec: ModelSpec | None) -> int:
        self._last_ask_id += 1
        entry.asks[self._last_ask_id] = spec
        return self._last_ask_id

    def record(self, event: ModelState) -> bool:
        """The engine reported a state; returns whether nothing that was asked of the model is open now.

        Where something was asked, only the answer to the last of it settles that.
        """
        entry = self._entries.get(event.model)
        if entry is None:
            return True
        if event.state == ModelLife.READY and event.stage:  # it serves on beside another load of it
            entry.stage = event.stage
            return False
        state, was_asked = ModelLife(event.state), bool(entry.asks)
        answered = entry.asks.get(event.answers)
        entry.asks = {ask_id: spec for ask_id, spec in entry.asks.items() if ask_id > event.answers}
        if entry.is_barred and event.error is None and state is not ModelLife.READY:  # nothing has changed
            return not entry.asks
        if not entry.can_move(state):
            log.error("the engine has %s %s, which was %s; %s", event.model, state, entry.state, entry.told)
        entry.set(state)
        entry.stage, entry.fraction = event.stage, event.fraction
        entry.trying = event.path, event.backend
        entry.reason, entry.error = event.reason, event.error
        is_answer = not entry.asks and (was_asked or entry.is_settled)
        was_to_change = entry.is_to_change
        if entry.state is ModelLife.READY:
            entry.is_served, entry.load_crashes = True, 0
            if event.error is None:  # else another was to take its place, and it stays
                earlier = answered.with_own(entry.spec) if answered else entry.spec
                entry.spec = entry.to_load if is_answer else earlier
        if event.info is not None:
            way = entry.spec.way_of(event.info.path, event.info.backend)  # that serves: with its template
            known = way.quantisation or entry.info.quantisation  # the header says it, an engine does not
            entry.info = msgspec.structs.replace(event.info.served_as(way), quantisation=known)
        if not is_answer:
            return False
        entry.is_due = entry.is_leaving = False
        entry.asked = None
        has_failed = entry.state is ModelLife.FAILED and not was_to_change
        if has_failed and event.error and event.error.code == LoadCrashedError.code:
            self._bar(entry, event.error)
        return True

    def suspend(self) -> None:
        """The engine is to leave: the next one loads what is in memory or loading now."""
        self._note_due()
        for entry in self._entries.values():
            entry.take_back()  # once the machine has slept, what was given up may work again
            if entry.is_barred:
                continue
            entry.move(ModelLife.SUSPENDED if entry.is_due else ModelLife.ABSENT)

    def begin_instance(self) -> None:
        """A new engine follows one that ended, and loads what that one had."""
        self._note_due()
        for entry in self._entries.values():
            if not entry.is_barred and entry.state is not ModelLife.SUSPENDED:
                entry.move(ModelLife.ABSENT)

    def _note_due(self) -> None:
        is_first = True
        for entry in self._entries.values():
            entry.asks.clear()
            if entry.state in _IN_MEMORY and not entry.is_leaving:
                # A caller's load may evict in the next engine too; those that fitted together do again.
                entry.may_evict = entry.is_due and entry.may_evict
                entry.is_due = True
            entry.is_leaving = False
            if entry.is_due:
                entry.may_evict |= is_first
                is_first = False

    def charge(self, ended: EngineExit, running: Iterable[str] = ()) -> list[str]:
        """Charge the exit to the models that were being loaded, which are barred at MAX_LOAD_CRASHES.

        One that has other ways to be served is served otherwise then, and so is one of `running`, on which
        requests ran, at MAX_STEP_CRASHES.

        Returns:
            The ids of those that were being loaded.
        """
        for entry in filter(None, map(self._entries.get, running)):
            entry.charge_step(ended)
        loading = [
            entry
            for entry in self._entries.values()
            if entry.state in _IN_MEMORY and entry.stage not in _NOT_BEGUN
        ]
        for entry in loading:
            if entry.state is ModelLife.READY:
                self._give_up_reload(entry, f"otherwise than it is now ended the engine: {ended.quoted}", 1)
            else:
                self._charge(entry, ended)
        return [entry.spec.id for entry in loading]

    def _charge(self, entry: ModelEntry, ended: EngineExit) -> None:
        entry.load_crashes += 1
        if entry.load_crashes >= MAX_LOAD_CRASHES:
            text = f"ended the engine {entry.load_crashes} times, last: {ended.quoted}"
            if entry.pass_on(*entry.trying, f"its load {text}"):
                return
            if entry.is_to_change:
                self._give_up_reload(entry, text, entry.load_crashes)
                entry.load_crashes = 0
                return
            entry.move(ModelLife.FAILED)
            self._bar(entry, _load_crash(entry, text, entry.load_crashes))

    def _give_up_reload(self, entry: ModelEntry, text: str, crashes: int) -> None:
        """Keep the model as it was loaded before; the load may be asked for again."""
        entry.reload_error = _load_crash(entry, text, crashes)
        entry.asked = entry.whole = None

    def _bar(self, entry: ModelEntry, error: ErrorInfo) -> None:
        entry.is_barred, entry.is_due = True, False
        entry.error = error
        entry.load_crashes = MAX_LOAD_CRASHES
        entry.mark = self._mark_of(entry.to_load.path)

    def _forgive_replaced(self, entry: ModelEntry) -> None:
        """Try again where another file has taken the place of the one that was barred."""
        if entry.is_barred and self._mark_of(entry.to_load.path) != entry.mark:
            entry.is_barred, entry.load_crashes = False, 0
            entry.move(ModelLife.ABSENT)


def _load_crash(entry: ModelEntry, text: str, crashes: int) -> ErrorInfo:
    model, path = entry.spec.id, entry.to_load.path
    return LoadCrashedError(f"loading {model!r} from {path} {text}", model=model, crashes=crashes).info()


def _status(entry: ModelEntry, leases: int) -> ModelStatus:
    is_ready = entry.state is ModelLife.READY
    return ModelStatus(
        id=entry.spec.id,
        state=str(entry.state),
        stage=entry.stage,
        fraction=entry.fraction,
        bytes=entry.info.memory_bytes if is_ready else {},
        is_pinned=entry.spec.is_pinned,
        leases=leases,
        keep_alive_s=entry.spec.keep_alive_s,
        degraded=entry.info.degraded if is_ready else [],
        reason=entry.error.message if entry.error else entry.reason,
    )
