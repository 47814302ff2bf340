"""What the documents of `/v1/runtime/events` add up to: everything a frame of `stoker top` shows.

Pure: no clock, no terminal. Documents are dicts as they came; what is unknown in them is ignored, what an
older server leaves out is empty.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Document: TypeAlias = dict[str, Any]

MAX_ROWS = 2048
"""Live requests that are kept; later ones are counted and not shown."""
MAX_RECENT = 64
"""Requests that have ended and are kept; past this the oldest goes."""
IN_SLOT = frozenset({"prefill", "decode"})
_NOT_THE_ROWS = frozenset({"event", "at", "id", "what", "move", "group", "moves"})
"""Fields of an event about a request that are none of its row."""
_PROGRESS = {"total": "prompt_tokens", "cached": "cached_tokens", "processed": "processed_tokens"}
_ENDED = "ended"
_UNLOADED = frozenset({"absent", "failed", "suspended"})


class RuntimeView:
    """A server as its events tell of it.

    Attributes:
        at: of the last document, in seconds since the epoch.
        version: of the server.
        engine: its state, process, label and threads, as in a snapshot.
        lanes: what each slot does, by model and slot.
        requests: rows of live requests and of calls of several, by id.
        recent: rows of what has ended, the oldest first.
        models: served models, by id.
        memory: the last figures of memory; empty: none yet.
        cache: the same of what is stored.
        heat: level, sensor and temperature.
        steps: the last figures of steps, by model.
        machines: of a site, where the server is a gate; empty: it computes by itself.
        num_hidden: live requests beyond MAX_ROWS.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.version = ""
        self.engine: Document = {}
        self.lanes: dict[tuple[str, int], Document] = {}
        self.requests: dict[str, Document] = {}
        self.recent: deque[Document] = deque(maxlen=MAX_RECENT)
        self.models: dict[str, Document] = {}
        self.memory: Document = {}
        self.cache: Document = {}
        self.heat: Document = {}
        self.steps: dict[str, Document] = {}
        self.machines: list[Document] = []
        self.num_hidden = 0
        self._engine_since = 0.0
        self._takes: Mapping[str, Callable[[Document], None]] = {
            "snapshot": self._take_snapshot,
            "request": self._take_request,
            "steps": self._take_steps,
            "memory": self._take_memory,
            "cache": self._take_cache,
            "heat": self._take_heat,
            "pressure": self._take_pressure,
            "rung": self._take_rung,
            "engine": self._take_engine,
            "model": self._take_model,
            "machines": self._take_machines,
        }

    def __repr__(self) -> str:
        return f"<RuntimeView of {len(self.requests)} requests at {self.at:.3f}>"

    # ------------------------------------------------------------ questions

    @property
    def waiting(self) -> list[Document]:
        """Rows of those without a slot: what is computed so, the queue, then what stands apart."""
        in_slots = {lane["request_id"] for lane in self.lanes.values() if lane.get("request_id")}
        busy_groups = {self.requests[one].get("group") for one in in_slots if one in self.requests}
        apart = (
            row
            for row in self.requests.values()
            if not row.get("group") and row["request_id"] not in in_slots | busy_groups
        )
        return sorted(apart, key=_place)

    def engine_age_s(self, now: float) -> float:
        """Seconds since the engine came to its state; `now` is on the clock of the documents."""
        return max(0.0, now - self._engine_since)

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Tokens of prompts and of answers that all models compute a second now."""
        prompt = sum(_rate(steps, "prompt_tokens") for steps in self.steps.values())
        return prompt, sum(_rate(steps, "tokens") for steps in self.steps.values())

    # ------------------------------------------------------------ what happens

    def take(self, document: Document) -> None:
        """Take note of one document; an unknown event changes nothing."""
        self.at = max(self.at, float(document.get("at", 0.0)))
        take = self._takes.get(str(document.get("event")))
        if take is not None:
            take(document)

    def _take_machines(self, document: Document) -> None:
        self.machines = list(document.get("machines", ()))

    def _take_snapshot(self, document: Document) -> None:
        self.version = document.get("version", "")
        self.engine = dict(document.get("engine", {}))
        self._engine_since = document["at"] - self.engine.get("for_s", 0.0)
        self.lanes = {(lane["model"], lane["slot"]): dict(lane) for lane in document.get("slots", ())}
        self.requests.clear()
        self.num_hidden = 0
        for row in (*document.get("requests", ()), *document.get("groups", ())):
            self._add(dict(row))
        self.recent.clear()
        self.recent.extend(document.get("recent", ()))
        at = document["at"]
        self.models = {model["model"]: {**model, "at": at} for model in document.get("models", ())}
        self.memory = dict(document.get("memory") or {})
        self.cache = dict(document.get("cache") or {})
        heat = document.get("heat") or {}
        self.heat = dict(heat) if isinstance(heat, dict) else {"level": heat}
        self.steps = {steps["model"]: dict(steps) for steps in document.get("steps", ())}
        self.machines = list(document.get("machines", ()))

    def _add(self, row: Document) -> Document:
        """Keep a row, if there is room; it."""
        if row["request_id"] in self.requests or len(self.requests) < MAX_ROWS:
            row["since"] = row["moves"][-1]["at"] if row.get("moves") else row.get("arrived_at", self.at)
            self.requests[row["request_id"]] = row
        else:
            self.num_hidden += 1
        return row

    def _take_request(self, document: Document) -> None:
        request_id, what = document["request_id"], document.get("what")
        fields = {name: value for name, value in document.items() if name not in _NOT_THE_ROWS}
        if what in {"finished", "failed"}:
            self._end(request_id, fields, document)
            return
        row = self.requests.get(request_id)
        if row is None:
            row = self._add({"state": "queued", "arrived_at": document["at"], "group": None, **fields})
        if what == "prefill_progress":
            fields |= {_PROGRESS[name]: fields.pop(name) for name in _PROGRESS.keys() & fields.keys()}
        row |= fields
        if document.get("group"):
            row["group"] = document["group"]
        if move := document.get("move"):
            self._move(row, move)

    def _move(self, row: Document, move: Document) -> None:
        """A choice of a request, or each of them, is somewhere else now."""
        request_id, state, index = row["request_id"], move["state"], move.get("index")
        if state not in IN_SLOT:
            self._leave(request_id, index)
        elif move.get("slot") is not None:
            lane = self.lanes.setdefault((row.get("model", ""), move["slot"]), {})
            lane |= {"model": row.get("model", ""), "slot": move["slot"], "request_id": request_id}
            lane |= {"index": index, "state": state}
            row["position"] = row["eta_s"] = None
        if state == _ENDED:  # one choice of several: the request has an end of its own
            return
        is_in_slot = any(lane.get("request_id") == request_id for lane in self.lanes.values())
        if state in IN_SLOT or not is_in_slot:  # of several choices the state of one that runs counts
            row["state"] = state
        row["since"] = move["at"]
        row["waits_for"] = "" if state in IN_SLOT else move.get("reason", "")

    def _leave(self, request_id: str, index: int | None) -> None:
        """Free the slot of a choice, or of each."""
        for (model, slot), lane in list(self.lanes.items()):
            if lane.get("request_id") == request_id and index in {None, lane.get("index")}:
                lane |= {"request_id": None, "index": None, "state": "idle"}
                if slot >= self.models.get(model, {}).get("num_slots", 0):  # one for a step in between
                    del self.lanes[model, slot]

    def _end(self, request_id: str, fields: Document, document: Document) -> None:
        self._leave(request_id, None)
        known = self.requests.pop(request_id, None)
        if known is None and self.num_hidden:
            self.num_hidden -= 1
        row = (known or {}) | fields
        if not (row.get("group") or document.get("group") or row.get("kind") == "load"):
            self.recent.append(row | {"state": "ended", "ended_at": document["at"]})

    def _take_steps(self, document: Document) -> None:
        self.steps[document["model"]] = document
        if document.get("threads"):  # steps on an accelerator use none
            self.engine |= {name: document.get(name, "") for name in ("threads", "threads_reason")}

    def _take_memory(self, document: Document) -> None:
        self.memory = document

    def _take_cache(self, document: Document) -> None:
        self.cache = document

    def _take_heat(self, document: Document) -> None:
        self.heat = document

    def _take_pressure(self, document: Document) -> None:
        self.memory = {
            **self.memory,
            "pressure": document.get("level", ""),
            "pressure_fraction": document.get("fraction", 0.0),
            "pressure_source": document.get("source", ""),
        }

    def _take_rung(self, document: Document) -> None:
        rungs = [rung for rung in self.memory.get("rungs", ()) if rung != document["rung"]]
        self.memory = {
            **self.memory,
            "rungs": rungs if document.get("is_undone") else [*rungs, document["rung"]],
        }

    def _take_engine(self, document: Document) -> None:
        if document.get("state") != self.engine.get("state"):
            self._engine_since = document["at"]
        self.engine |= {name: value for name, value in document.items() if name not in _NOT_THE_ROWS}
        if document.get("state") != "serving":
            self.steps.clear()

    def _take_model(self, document: Document) -> None:
        model_id = document["model"]
        known = self.models.setdefault(model_id, {"model": model_id})
        known |= {"stage": "", "fraction": 0.0, "reason": "", "error": None, "at": document["at"]}
        known |= {name: value for name, value in document.items() if name not in _NOT_THE_ROWS}
        num_slots = known.get("num_slots") or 0
        if known.get("state") in _UNLOADED:
            num_slots = 0
            self.steps.pop(model_id, None)
        for key in self._lanes_of(model_id):
            if key[1] >= num_slots:
                del self.lanes[key]
        for slot in range(num_slots):
            idle = {"model": model_id, "slot": slot, "request_id": None, "index": None, "state": "idle"}
            self.lanes.setdefault((model_id, slot), idle)

    def _lanes_of(self, model_id: str) -> Iterator[tuple[str, int]]:
        return iter([key for key in self.lanes if key[0] == model_id])


_ORDER = {
    "prefill": -1,
    "decode": -1,
    "prefix_wait": 0,
    "queued": 0,
    "preparing": 1,
    "held": 2,
    "parked": 3,
    "paused": 4,
}


def _place(row: Document) -> tuple[int, int, float]:
    """What rows of those that wait are sorted by."""
    position = row.get("position")
    return _ORDER.get(row.get("state", ""), 5), MAX_ROWS if position is None else position, row["arrived_at"]


def _rate(steps: Document, name: str) -> float:
    span_s = float(steps.get("span_s") or 0.0)
    return float(steps.get(name, 0)) / span_s if span_s > 0 and steps.get("num_steps") else 0.0
