"""Stoker: one process owns a machine's accelerator and memory, and shares them between its users.

Names are imported when they are first used: an engine, which needs few of them, starts sooner, and so does a
command.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker import errors, events, sync
    from stoker.audio import Audio
    from stoker.client.requests.stream import ToolCall
    from stoker.documents import Document
    from stoker.errors import StokerError
    from stoker.events import RuntimeEvent
    from stoker.images import Image
    from stoker.ipc.constraint import Constraint, ConstraintKind
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.request import FinishReason, GenerateRequest, Preempt, Priority, Sampling
    from stoker.ipc.usage import Timings, TokenLogprob, Usage
    from stoker.models.states.store import SavedState
    from stoker.runtime import Runtime, RuntimeStatus, TextDelta
    from stoker.settings import EngineSettings
    from stoker.tasks.ask import Answer
    from stoker.tasks.batch import BatchProgress
    from stoker.tasks.choose import Choice, Choices
    from stoker.tasks.embed import TextEmbeddings
    from stoker.tasks.fields import Message
    from stoker.tasks.read_images import Reading
    from stoker.tasks.rerank import RankedDocument, Ranking
    from stoker.tasks.run_tools import ToolRun
    from stoker.tasks.states import StateEmbedding

__all__ = [
    "Answer",
    "Audio",
    "BatchProgress",
    "Choice",
    "Choices",
    "Constraint",
    "ConstraintKind",
    "Document",
    "EngineSettings",
    "FinishReason",
    "GenerateRequest",
    "Image",
    "Message",
    "ModelInfo",
    "Preempt",
    "Priority",
    "RankedDocument",
    "Ranking",
    "Reading",
    "Runtime",
    "RuntimeEvent",
    "RuntimeStatus",
    "Sampling",
    "SavedState",
    "StateEmbedding",
    "StokerError",
    "TextDelta",
    "TextEmbeddings",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolRun",
    "Usage",
    "errors",
    "events",
    "sync",
]
_HOMES = {
    "stoker.audio": "Audio",
    "stoker.client.requests.stream": "ToolCall",
    "stoker.documents": "Document",
    "stoker.errors": "StokerError",
    "stoker.events": "RuntimeEvent",
    "stoker.images": "Image",
    "stoker.ipc.constraint": "Constraint ConstraintKind",
    "stoker.ipc.model": "ModelInfo",
    "stoker.ipc.request": "FinishReason GenerateRequest Preempt Priority Sampling",
    "stoker.ipc.usage": "Timings TokenLogprob Usage",
    "stoker.models.states.store": "SavedState",
    "stoker.runtime": "Runtime RuntimeStatus TextDelta",
    "stoker.settings": "EngineSettings",
    "stoker.tasks.ask": "Answer",
    "stoker.tasks.batch": "BatchProgress",
    "stoker.tasks.choose": "Choice Choices",
    "stoker.tasks.embed": "TextEmbeddings",
    "stoker.tasks.fields": "Message",
    "stoker.tasks.read_images": "Reading",
    "stoker.tasks.rerank": "RankedDocument Ranking",
    "stoker.tasks.run_tools": "ToolRun",
    "stoker.tasks.states": "StateEmbedding",
}
"""Which module a name is imported from, as for a type checker above."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

logging.getLogger("stoker").addHandler(logging.NullHandler())  # who shows the log is up to the application


def __getattr__(name: str) -> Any:
    """A name of `__all__`, when it is first used (PEP 562)."""
    if name in _HOME_OF:
        found = getattr(import_module(_HOME_OF[name]), name)
    elif name in __all__:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
