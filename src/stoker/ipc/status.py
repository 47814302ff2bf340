"""The state of the engine as `/v1/runtime` and the metrics show it: values only."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from stoker.errors import ErrorInfo
from stoker.ipc.request import Priority
from stoker.ipc.shared_store import SharedStoreStatus
from stoker.ipc.usage import GapStatus, Timings, Usage


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One slot: `state` is idle, prefill or decode; an idle slot may still hold reusable tokens.

    `story` is what happened to the sequence in it, oldest first, each with the seconds since; `others` are
    the requests that it names, `index` the choice.
    """

    id: int
    state: str
    model: str
    num_tokens: int
    request_id: str | None = None
    priority: Priority | None = None
    story: list[tuple[float, str]] = []
    index: int | None = None
    others: list[str] = []


class WaitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that waits, is parked or is paused.

    Attributes:
        index: which choice of the request.
        position: place in the queue, 0 is next; None: paused, so not in the queue.
        eta_s: estimated seconds until it runs; None: unknown, or paused.
        form: how a parked or paused one is kept: cells, snapshot or tokens.
        story, others: as in `SlotStatus`.
        reason: why it waits, for people.
        by: the request that `reason` names; None: it names none.
    """

    request_id: str
    priority: Priority
    index: int = 0
    model: str = ""
    position: int | None = None
    eta_s: float | None = None
    num_tokens: int = 0
    form: str | None = None
    story: list[tuple[float, str]] = []
    others: list[str] = []
    reason: str = ""
    by: str | None = None


class RequestMove(msgspec.Struct, frozen=True, kw_only=True):
    """A change of what a request does, or of why it waits.

    Attributes:
        at: seconds since the epoch.
        state: held, preparing, queued, prefix_wait, prefill, decode, parked, paused or ended.
        index: the choice; None: all that have not ended.
        slot: of the choice; None: it has none.
        reason: for people; of an end its reason or its error's code.
        by: the request that `reason` names; None: it names none.
    """

    at: float
    state: str
    index: int | None = None
    slot: int | None = None
    reason: str = ""
    by: str | None = None


class CallKind(StrEnum):
    """What a caller's call of several requests computes."""

    EMBED = "embed"
    RERANK = "rerank"
    CHOOSE = "choose"
    STATE = "state"
    READ = "read"


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One call that is several requests of the engine, which are cancelled, paused and resumed by its id.

    Attributes:
        names: what else it is known by.
        owner: digest of the API key that it came with; empty: none.
        state: queued, running or paused.
        num_members, num_done: requests it is made of, and those that have ended with what they were for.
        position, eta_s: of its foremost request, as in `WaitStatus`; None: one runs, or none waits.
        deadline_s: seconds left of its `timeout_s`; None: it has none.
        age_s: seconds since it began.
        waits_for: why it does not compute now, for people; empty: a request of it does.
        moves: what it went through, the last 64, the oldest first.
        usage: of those that have ended.
        timings: of the same: the time in the queue of the first of them, and the sum of the others.
    """

    id: str
    names: tuple[str, ...] = ()
    owner: str = ""
    kind: CallKind
    model: str
    priority: Priority
    state: str
    num_members: int
    num_done: int = 0
    position: int | None = None
    eta_s: float | None = None
    deadline_s: float | None = None
    age_s: float = 0.0
    waits_for: str = ""
    moves: list[RequestMove] = []
    usage: Usage = Usage()
    timings: Timings = Timings()


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or call of several, as its client's side of the engine knows it; no text of it.

    Attributes:
        owner: digest of the API key that it came with; empty: none.
        kind: chat, completion, or a `CallKind`.
        route: path of the HTTP route that it came by, or "library".
        arrived_at: seconds since the epoch.
        prompt_tokens, cached_tokens, completion_tokens: over all its requests or choices.
        max_tokens: what each choice may have; None: until the context is full.
        queue_s: from arrival to the first slot; of one that got none, to its end.
        first_token_s: from arrival to the first token; None: there was none.
        decode_s: from the first token to the end; of a call the sum of its requests.
        tokens_per_second: of those after the first, without time spent parked; None: there are none.
        num_parks, parked_s: how often others got its slot, and how long it waited then.
        waited_for: what it waited for longest; empty: nothing to speak of.
        finish_reason: of its choices; of a call "stop" or "cancelled"; None: it failed, or has not ended.
        error: why it failed.
        state: where it is: held (no engine has it), preparing, queued, prefill, decode, parked, paused or
            ended.
        processed_tokens: of the prompt, computed or cached so far.
        position, eta_s: its place in the queue and estimated seconds until it runs; None: none, or not known.
        waits_for: why it does not compute now, for people; empty: it does, or has ended.
        cache_source: where the cached tokens came from; None: there are none.
        end_to_end_s: from arrival to the end, or to now.
        itl_ms: between deliveries, without time spent parked, paused or without an engine; None: there were
            no two.
        num_restarts: engines that ended, or were suspended, while it lived.
        draft_tokens, accepted_tokens: that were guessed for it, and those of them that were right.
        moves: what it went through, the last 64, the oldest first; num_moves counts all.
        num_members, num_done: of a call of several requests; None: it is one.
        stage, fraction: how far a load is (kind "load").
    """

    request_id: str
    owner: str = ""
    model: str
    priority: Priority
    kind: str
    route: str
    arrived_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    max_tokens: int | None = None
    queue_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    tokens_per_second: float | None = None
    num_parks: int = 0
    parked_s: float = 0.0
    waited_for: str = ""
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    state: str = "ended"
    processed_tokens: int = 0
    position: int | None = None
    eta_s: float | None = None
    waits_for: str = ""
    cache_source: str | None = None
    end_to_end_s: float = 0.0
    itl_ms: GapStatus | None = None
    num_restarts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    moves: list[RequestMove] = []
    num_moves: int = 0
    num_members: int | None = None
    num_done: int | None = None
    stage: str = ""
    fraction: float | None = None

    def as_row(self) -> dict[str, Any]:
        """Its fields as JSON can hold them, without the owner; of an error its code and message."""
        row: dict[str, Any] = msgspec.to_builtins(self)
        del row["owner"]
        if self.error is not None:
            row["error"] = {"code": self.error.code, "message": self.error.message}
        return row


class ExitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An end of an engine that nobody asked for.

    Attributes:
        at: seconds since the epoch.
        pid: its process.
        reason: why, as far as is known; may name a request or a model.
        served_s: how long it had served.
        num_survived, num_failed: requests that went on with the next engine, and that ended with this one.
        next_start_s: seconds until the next was started.
    """

    at: float
    pid: int
    reason: str
    served_s: float
    num_survived: int
    num_failed: int
    next_start_s: float


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache now (SPEC C14).

    Attributes:
        num_entries: stored prefixes, in host memory or on disk.
        ram_bytes, disk_bytes: their sizes; parked requests' states are counted apart.
        ram_limit_bytes, disk_limit_bytes: the bounds of these; 0: the tier is off.
        num_unsaved: stored prefixes that are not on disk yet.
        disk_problem: why the disk tier is not used although it is wanted; empty: it is used.
        shared: a store that other machines use too; None: there is none.
    """

    num_entries: int = 0
    ram_bytes: int = 0
    ram_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    num_ram: int = 0
    num_disk: int = 0
    num_unsaved: int = 0
    disk_problem: str = ""
    shared: SharedStoreStatus | None = None


class PrefixStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stored prefix; none of its tokens.

    Attributes:
        namespace: the beginning of a digest that is equal for those that share.
        source: path of the model's file.
        where: pending, ram, disk or reading; junction: it is what others have in common, and not stored.
        own_tokens: of `num_tokens`, those that no other stored prefix has.
        num_hits: requests that went on from it since this program has it.
        idle_s: seconds since the last.
        num_leases: who needs it where it is.
        id, parent: its place in the tree of what begins alike; None: nothing is before it.
        model: id of the model; empty: it is not in memory.
        used_by: requests that compute now and begin with it.
    """

    namespace: str
    source: str
    where: str
    num_tokens: int
    own_tokens: int
    ram_bytes: int
    disk_bytes: int
    num_hits: int
    idle_s: float
    num_leases: int
    is_background: bool
    id: str = ""
    parent: str | None = None
    model: str = ""
    used_by: list[str] = []


class StreamingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a model that are read from its file as they are needed, in bytes (SPEC R14).

    Attributes:
        size: of all of them.
        budget: what may stay in memory now.
        resident: what of them is in memory.
        num_faults: page faults of steps that had to wait for the disk.
        read_bytes, read_s: what steps have read from the disk, and how long these steps took.
    """

    size: int
    budget: int
    resident: int
    num_faults: int = 0
    read_bytes: int = 0
    read_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """What the disk has given a second, the computing between included; 0: not measured."""
        return self.read_bytes / self.read_s if self.read_s else 0.0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One served model (SPEC L1, R3, R8).

    Attributes:
        state: absent, downloading, loading, ready, suspended, failed or unloading.
        stage, fraction: how far a load is.
        num_bytes: of the file of a download; 0: not known.
        bytes: of weights, kv, compute, ...; of one that is not loaded what they would be.
        is_pinned: it is never unloaded to make room.
        leases: requests that run on it or wait for it; it is not unloaded while there are any.
        keep_alive_s: in memory after its last request; negative: for good.
        unload_in_s: seconds until it is unloaded; None: it is not.
        degraded: what it got less of than was asked for.
        reason: why it is not ready; of one that is, why what was to serve it does not.
        streaming: of one whose experts are not all in memory; None: of others.
    """

    id: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    num_bytes: int = 0
    bytes: dict[str, int] = {}
    is_pinned: bool = False
    leases: int = 0
    keep_alive_s: float = 0.0
    unload_in_s: float | None = None
    degraded: list[str] = []
    reason: str = ""
    streaming: StreamingStatus | None = None


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Memory as it was last measured, in bytes (SPEC M1, M3, M4).

    Attributes:
        limit: the effective limit.
        footprint: of the engine and its client.
        available: can be used now without swapping, inside every limit.
        tier: ultra_low, low, standard or high.
        pressure: normal, warning or critical; empty: not measured yet.
        pressure_fraction, pressure_source: the worst source and its fraction.
        rungs: rungs of the ladder that are taken, in order.
        lines: the ledger: bytes by purpose, of all models together, those on devices among them.
        heat: nominal, fair, serious or critical.
        thresholds: where levels begin, by source and level: fractions of the limit, percent of stall for
            `psi`, degrees Celsius for `heat` (fair begins so far below high).
        ladder: every rung there is, the first to be taken first.
    """

    limit: int = 0
    footprint: int = 0
    available: int = 0
    tier: str = ""
    pressure: str = ""
    pressure_fraction: float = 0.0
    pressure_source: str = ""
    rungs: list[str] = []
    lines: dict[str, int] = {}
    heat: str = "nominal"
    thresholds: dict[str, float] = {}
    ladder: list[str] = []


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What models can be computed on, with its own memory in bytes (SPEC M8).

    Attributes:
        id: as settings name it, such as "CUDA0".
        name: for people; `kind` is that of its native library.
        is_used: models were loaded on it.
        is_integrated: it uses the machine's memory, which counts once.
        total, free: of its own memory; 0: it has none, or does not say.
        own: what models here hold of it; None: one is being loaded or freed.
        others: what other programs and the driver hold of it; None: not known for the same reason.
        celsius, power_w: as its driver says; None: it does not.
        held_by: another Stoker that has the lease on it, for people; empty: none has.
        lines: the ledger: bytes of it by purpose, of all models together.
    """

    id: str
    name: str
    kind: str = ""
    is_used: bool = False
    is_integrated: bool = False
    total: int = 0
    free: int = 0
    own: int | None = 0
    others: int | None = 0
    celsius: float | None = None
    power_w: float | None = None
    held_by: str = ""
    lines: dict[str, int] = {}


class MachineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a site, as its gate knows it.

    Attributes:
        state: up, draining, suspended, trial (it failed, and one request tries it) or down.
        reason: why it gets nothing new; empty: it does.
        num_slots, num_busy, num_waiting: of its engine.
        num_requests: that this gate has there now; num_moved: that it took away from there, in all.
        heat, pressure: as it was last heard of, `age_s` seconds ago; None: never.
        models: ids of those in memory.
        slots: by model, the number that this gate gives the first of its slots there, and how many they are.
    """

    name: str
    url: str
    state: str
    reason: str = ""
    num_slots: int = 0
    num_busy: int = 0
    num_waiting: int = 0
    num_requests: int = 0
    num_moved: int = 0
    heat: str = ""
    pressure: str = ""
    age_s: float | None = None
    models: list[str] = []
    slots: dict[str, tuple[int, int]] = {}


class ModelRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What a model in memory has left for a new request, and what was measured of it.

    Attributes:
        num_cells: of its pool.
        free_cells: of these, what no running sequence holds: stored and parked states give way.
        interactive_wait_s: seconds until one more person would run; None: nothing was measured yet.
        prefill_tokens_per_s: of a prompt, on a quiet machine; 0: nothing was measured yet.
        fingerprint: of its file and of how states are laid out: where it is equal, states are.
    """

    num_cells: int
    free_cells: int
    interactive_wait_s: float | None = None
    prefill_tokens_per_s: float = 0.0
    fingerprint: str = ""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `/v1/runtime` and the metrics show of the engine.

    `num_threads` is what steps use now, `threads_reason` why that differs from the setting (empty: it does
    not); `devices` are what models can be computed on. `activity` is of the last quarter of a minute,
    by model: milliseconds, rows and tokens of a step, and the shares of time for people and for jobs.
    `prefixes` are the longest stored ones, `machines` those that a gate serves with,
    `rooms` what each model in memory has left.
    """

    slots: list[SlotStatus]
    queue: list[WaitStatus]
    parked: list[WaitStatus]
    paused: list[WaitStatus] = []
    num_threads: int = 0
    threads_reason: str = ""
    devices: list[DeviceStatus] = []
    counters: dict[str, float]
    cache: CacheStatus = CacheStatus()
    models: list[ModelStatus] = []
    memory: MemoryStatus = MemoryStatus()
    kv_cells_total: int
    kv_cells_used: int
    activity: dict[str, dict[str, float]] = {}
    prefixes: list[PrefixStatus] = []
    machines: list[MachineStatus] = []
    rooms: dict[str, ModelRoom] = {}


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine serves, and if not, why and until when.

    Attributes:
        state: that of `RuntimeStatus`, or failing (several starts in a row have failed; further ones follow),
            closing (what runs is finished) or failed (no engine is started any more).
        for_s: seconds since the last move of the engine's lifecycle.
        num_failed_starts: starts in a row that have failed.
        next_start_s: seconds until the next start; None: it is under way, or there is none.
        reason: why there is no engine, or why the last start failed.
    """

    state: str
    for_s: float = 0.0
    num_failed_starts: int = 0
    next_start_s: float | None = None
    reason: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it serves, or may do so without help."""
        return self.state not in {"failing", "failed", "closed"}


class RuntimeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `/v1/runtime` shows. `engine` is empty while no engine serves; what it holds is at hand here too.

    Attributes:
        pid: the engine's process.
        state: starting, serving, restarting, suspended or closed.
        restarts: exits of the engine that were not asked for.
        label: backend and device of each model in memory, equal ones once; else of the default model.
        threads: CPU threads its steps use now; `engine.threads_reason` says why not as many as set.
        health: why it does not serve, and when the next start is.
        groups: calls that are several requests, the oldest first.
        requests: live requests, in order of submission; those of a group are in `groups`.
        recent: the last requests and calls that ended, the oldest first.
        exits: the last ends of engines that nobody asked for, the oldest first.
        as_of_s: seconds since the engine said what `engine` shows; 0: just now, or there is none. Later
            figures of slots and waiting requests are the client's.
        up_s: seconds since the program started it.
        version: of this package.
        settings: of the engine, as they are in effect.
    """

    pid: int
    state: str
    restarts: int
    label: str
    threads: int
    engine: EngineStatus
    health: EngineHealth
    groups: list[GroupStatus] = []
    requests: list[RequestStatus] = []
    recent: list[RequestStatus] = []
    exits: list[ExitStatus] = []
    as_of_s: float = 0.0
    up_s: float = 0.0
    version: str = ""
    settings: dict[str, Any] = {}

    @property
    def slots(self) -> list[SlotStatus]:
        """Of every loaded model, idle ones too."""
        return self.engine.slots

    @property
    def queue(self) -> list[WaitStatus]:
        """Who waits, the next one first."""
        return self.engine.queue

    @property
    def parked(self) -> list[WaitStatus]:
        """Who gave way and goes on later."""
        return self.engine.parked

    @property
    def paused(self) -> list[WaitStatus]:
        """Who stands still until it is resumed."""
        return self.engine.paused

    @property
    def models(self) -> list[ModelStatus]:
        """Every served model."""
        return self.engine.models

    @property
    def memory(self) -> MemoryStatus:
        """As it was last measured."""
        return self.engine.memory

    @property
    def cache(self) -> CacheStatus:
        """The prefix cache."""
        return self.engine.cache

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the engine's start."""
        return self.engine.counters
