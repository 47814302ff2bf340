"""What a shared store holds, what is put there and what is got from it (SPEC C19).

Pure: operations leave as values, `threads` runs them, and how they ended comes back by `handle`. What the
store has is known from listings, which are made in the background: no request waits for one. One look and
one put run at a time; a call that does not return holds its place, and nothing else waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.disk.tier import BUSY_SETTLE_S, SETTLE_S
from stoker.cache.entry import MIN_TOKENS, Entry, EntryIndex, EntryState, Hit, Line, Snapshot, StoreCopy
from stoker.cache.shared.names import StoredName, StoreLimits, place_of
from stoker.cache.shared.rule import StoreBreaker, StoreSpeed, wait_limit_s
from stoker.ipc.shared_store import SharedStoreStatus

LOOK_EVERY_S = 30.0
"""Between two listings; what others have put is known so much later."""
CALL_LIMIT_S = 60.0
"""A listing or a put that takes longer counts as a failure."""
MAX_GETS = 4
"""At once, those that were given up and have not returned among them."""
REFRESH_SHARE = 0.5
"""Of the time to live, after which a prefix that is still in use is written anew."""


@dataclass(frozen=True, slots=True)
class Look:
    """List the store, keep it within its limits, and read the heads of the files of these models.

    Attributes:
        models: fingerprints by place.
    """

    models: dict[str, str]


@dataclass(frozen=True, slots=True)
class Put:
    """Write a prefix; `data` is its state."""

    entry: Entry
    place: str
    data: Snapshot


@dataclass(frozen=True, slots=True)
class Get:
    """Read the bytes of `entry` from its copy."""

    entry: Entry
    name: StoredName


SharedOp = Look | Put | Get


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of the store, and what its head says; `age_s` since it was written."""

    name: StoredName
    new: NewPrefix
    age_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """A look has ended.

    Attributes:
        files: of the models that were asked for.
        num_files, size_bytes: of all models.
        num_removed: files that had to go.
        call_s: seconds of a call that reads a head; 0: none was read.
        problem: why there is nothing to say; empty: there is.
    """

    files: tuple[SharedFile, ...] = ()
    num_files: int = 0
    size_bytes: int = 0
    num_removed: int = 0
    call_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PutEnded:
    """A put has ended; without a name: for which problem."""

    entry: Entry
    name: StoredName | None
    took_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Got:
    """A get has ended.

    Attributes:
        data: the state; None: it could not be had.
        num_bytes: that were read.
        reason: why there is no state.
        is_lost: the file is gone, or not what was written; with the store nothing is wrong.
    """

    entry: Entry
    data: Snapshot | None
    num_bytes: int = 0
    took_s: float = 0.0
    reason: str = ""
    is_lost: bool = False


SharedOutcome = Looked | PutEnded | Got


@dataclass(frozen=True, slots=True)
class _ListedPrefix:
    """A file of a model that is loaded here: an entry that only says what it serves."""

    entry: Entry
    name: StoredName
    written_s: float


class SharedTier:
    """The shared store as this engine knows it.

    Args:
        limits: of the whole store.
        url: for people.

    Attributes:
        speed: of the store, as it is measured.
        breaker: whether it is asked.
        put_breaker: whether anything is put there: a store that is full, or that may be read only, is read.
    """

    def __init__(self, limits: StoreLimits, url: str) -> None:
        self.speed = StoreSpeed()
        self.breaker = StoreBreaker()
        self.put_breaker = StoreBreaker()
        self._limits = limits
        self._url = url
        self._ops: list[SharedOp] = []
        self._places: dict[str, str] = {}
        self._index = EntryIndex()
        self._known: dict[Entry, _ListedPrefix] = {}
        self._due_s: dict[Entry, float] = {}
        self._gets: dict[Entry, float] = {}  # and when each is given up
        self._num_getting = 0
        self._putting: tuple[Entry, float] | None = None
        self._looking_s: float | None = None
        self._look_s = 0.0
        self._num_files = self._size_bytes = 0
        self._counts: dict[str, float] = dict.fromkeys(
            ("puts", "put_bytes", "gets", "got_bytes", "lost", "late", "failures", "removed", "slower"), 0.0
        )

    def __repr__(self) -> str:
        return f"<SharedTier {self._url}: {len(self._known)} prefixes, {self.speed!r}, {self.breaker!r}>"

    # ------------------------------------------------------------ questions

    def find(
        self,
        namespace: bytes,
        key: bytes,
        num_known: int,
        compute_s: Callable[[int], float | None],
        *,
        is_exact: bool,
    ) -> Hit | None:
        """A prefix in the store that is got quicker than what it saves is computed; a new entry to be read.

        Args:
            namespace: of the prompt.
            key: of the prompt.
            num_known: tokens of it that are at hand.
            compute_s: seconds that computing so many tokens takes; None: nothing was measured.
            is_exact: its model cannot go back.
        """
        if self.breaker.is_open or self._num_getting >= MAX_GETS:
            return None
        for hit in self._index.find(namespace, key, is_exact=is_exact):
            gain, known = hit.num_tokens - num_known, self._known[hit.entry]
            if gain < MIN_TOKENS:
                return None
            wait_s = wait_limit_s(self.speed.get_s(known.name.size_bytes), compute_s(gain))
            if wait_s > 0.0:
                return Hit(_new_entry(known, wait_s), hit.num_tokens)
            self._counts["slower"] += 1
        return None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be put, or nothing can be."""
        can_put = not (self.breaker.is_open or self.put_breaker.is_open)
        return not can_put or (self._putting is None and not self._due_s)

    @property
    def problem(self) -> str:
        """Why it is not used as it should be; empty: it is."""
        return self.breaker.problem or self.put_breaker.problem

    def next_due_s(self, rest_s: float = 0.0) -> float | None:
        """When `tend` or `late` has something to do, puts not before `rest_s`; None: not by time alone."""
        due = list(self._gets.values())
        if self._putting is not None:
            due.append(self._putting[1])
        if self._looking_s is not None:
            due.append(self._looking_s)
        elif self._places:
            due.append(self.breaker.until_s if self.breaker.is_open else self._look_s)
        if self._putting is None and self._due_s and not self.breaker.is_open:
            due.append(max(min(self._due_s.values()), self.put_breaker.until_s, rest_s))
        return min(due, default=None)

    def stats(self) -> dict[str, float]:
        """Every counter."""
        return {f"prefix_store_{name}_total": value for name, value in self._counts.items()}

    def status(self) -> SharedStoreStatus:
        """What is known of it now."""
        return SharedStoreStatus(
            url=self._url,
            num_files=self._num_files,
            num_usable=len(self._known),
            size_bytes=self._size_bytes,
            limit_bytes=self._limits.size_bytes,
            num_unsaved=len(self._due_s) + (self._putting is not None),
            latency_ms=round(self.speed.latency_s * 1000, 3),
            bytes_per_s=round(self.speed.bytes_per_s),
            problem=self.problem,
        )

    # ------------------------------------------------------------ what there is to do

    def model_loaded(self, model: str, apart: str) -> None:
        """States of this model are used from now on; `apart` keeps machines that compute otherwise apart."""
        if model:
            self._places[model] = place_of(model, apart)
            self._look_s = 0.0

    def note(self, entry: Entry, now: float) -> None:
        """An entry is in host memory: it is put soon, unless the store has it."""
        is_wanted = entry.is_shareable and not entry.is_private and entry.line is Line.CACHE
        if not is_wanted or entry.model not in self._places or self.breaker.is_open:
            return
        known = self._index.get(entry.namespace, entry.key)
        is_old = known and now - self._known[known].written_s > REFRESH_SHARE * self._limits.ttl_s
        if (known is None or is_old) and entry.size_bytes <= self._limits.size_bytes:
            self._due_s[entry] = now + SETTLE_S

    def get(self, entry: Entry, now: float) -> None:
        """Begin to read an entry that `find` has made."""
        assert entry.copy is not None, f"{entry!r} is in no store"
        name = StoredName.parse(entry.copy.name)
        assert name is not None, entry.copy.name
        self._gets[entry] = now + entry.copy.wait_s
        self._num_getting += 1
        self._counts["gets"] += 1
        self._ops.append(Get(entry, name))

    def tend(self, now: float, *, is_busy: bool = False) -> None:
        """Begin what is due."""
        if self._looking_s is not None and now >= self._looking_s:
            self._looking_s = now + CALL_LIMIT_S
            self._fail(f"a listing takes longer than {CALL_LIMIT_S:g} s", now)
        if self._putting is not None and now >= self._putting[1]:
            self._putting = self._putting[0], now + CALL_LIMIT_S
            self._fail(f"a put takes longer than {CALL_LIMIT_S:g} s", now, self.put_breaker)
        self._begin_look(now)
        if self.breaker.is_open:
            self._due_s.clear()
        elif self._putting is None and now >= self.put_breaker.until_s:
            self._begin_put(now - (BUSY_SETTLE_S - SETTLE_S if is_busy else 0.0), now)

    def _begin_look(self, now: float) -> None:
        at = self.breaker.until_s if self.breaker.is_open else self._look_s
        if self._looking_s is None and self._places and now >= at:
            self._looking_s, self._look_s = now + CALL_LIMIT_S, now + LOOK_EVERY_S
            self._ops.append(Look({place: model for model, place in self._places.items()}))

    def _begin_put(self, until_s: float, now: float) -> None:
        for entry in [entry for entry, at in self._due_s.items() if at <= until_s]:
            del self._due_s[entry]
            if entry.state is EntryState.RAM and entry.data is not None:
                self._putting = entry, now + CALL_LIMIT_S
                self._ops.append(Put(entry, self._places[entry.model], entry.data))
                return

    def late(self, now: float) -> list[Entry]:
        """Entries whose get is given up now: computing them is quicker than to wait on."""
        given_up = [entry for entry, at in self._gets.items() if now >= at]
        for entry in given_up:
            del self._gets[entry]
            self._counts["late"] += 1
            waited_s = entry.copy.wait_s if entry.copy else 0.0
            self._fail(f"it did not give a state within {waited_s:.2f} s", now)
        return given_up

    def hurry(self) -> None:
        """The engine ends: every put is due now."""
        self._due_s = dict.fromkeys(self._due_s, 0.0)

    def take_ops(self) -> list[SharedOp]:
        """What is to be done, in order; taken once."""
        ops, self._ops = self._ops, []
        return ops

    # ------------------------------------------------------------ how it ended

    def handle(self, outcome: SharedOutcome, now: float) -> Got | None:
        """Take in how an operation ended; returns a get that is still waited for."""
        match outcome:
            case Looked():
                self._looked(outcome, now)
            case PutEnded():
                self._put_ended(outcome, now)
            case Got() if self._got(outcome, now):
                return outcome
        return None

    def _looked(self, outcome: Looked, now: float) -> None:
        self._looking_s = None
        if outcome.problem:
            self._fail(outcome.problem, now)
            return
        self.breaker.worked()
        self._num_files, self._size_bytes = outcome.num_files, outcome.size_bytes
        self._counts["removed"] += outcome.num_removed
        self.speed.learn(1, outcome.call_s)
        self._index, self._known = EntryIndex(), {}
        for file in outcome.files:
            self._take_in(file.new, file.name, now - file.age_s)

    def _take_in(self, new: NewPrefix, name: StoredName, written_s: float) -> None:
        entry = _listed_entry(new, name)
        if (known := self._index.get(entry.namespace, entry.key)) is not None:
            self._drop(known)
        self._index.insert(entry)
        self._known[entry] = _ListedPrefix(entry, name, written_s)

    def _drop(self, known: Entry) -> None:
        self._index.remove(known)
        del self._known[known]

    def _put_ended(self, outcome: PutEnded, now: float) -> None:
        self._putting = None
        entry, name = outcome.entry, outcome.name
        if name is None:
            self._fail(outcome.problem, now, self.put_breaker)
            return
        self.put_breaker.worked()
        self._counts["puts"] += 1
        self._counts["put_bytes"] += name.size_bytes
        self._num_files += 1
        self._size_bytes += name.size_bytes
        if entry.model in self._places:
            flags = {"is_background": entry.is_background, "is_exact": entry.is_exact}
            self._take_in(NewPrefix(entry.namespace, entry.model, "", entry.key, **flags), name, now)

    def _got(self, outcome: Got, now: float) -> bool:
        """Whether it was waited for."""
        entry = outcome.entry
        is_awaited = self._gets.pop(entry, None) is not None
        self._num_getting -= 1
        if outcome.data is not None:
            self._counts["got_bytes"] += outcome.num_bytes
            self.speed.learn(outcome.num_bytes, outcome.took_s)
            if is_awaited:
                self.breaker.worked()
        elif outcome.is_lost:
            self._counts["lost"] += 1
            if (known := self._index.get(entry.namespace, entry.key)) is not None:
                self._drop(known)
        elif is_awaited:
            self._fail(outcome.reason, now)
        return is_awaited

    def _fail(self, reason: str, now: float, breaker: StoreBreaker | None = None) -> None:
        self._counts["failures"] += 1
        (breaker or self.breaker).failed(reason, now)


def _listed_entry(new: NewPrefix, name: StoredName) -> Entry:
    return Entry(
        namespace=new.namespace,
        model=new.model,
        source="",
        key=new.tokens,
        size_bytes=name.size_bytes,
        is_exact=new.is_exact,
        is_background=new.is_background,
    )


def _new_entry(known: _ListedPrefix, wait_s: float) -> Entry:
    listed = known.entry
    return Entry(
        namespace=listed.namespace,
        model=listed.model,
        source="",
        key=listed.key,
        size_bytes=listed.size_bytes,
        is_exact=listed.is_exact,
        is_background=listed.is_background,
        is_shareable=True,
        copy=StoreCopy(str(known.name), wait_s),
        state=EntryState.SHARED,
    )
