"""Stoker: one process owns a machine's accelerator and memory, and shares them between its users."""

import logging

from stoker import errors, events, sync
from stoker.client.requests.stream import ToolCall
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
    "BatchProgress",
    "Choice",
    "Choices",
    "Constraint",
    "ConstraintKind",
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

logging.getLogger("stoker").addHandler(logging.NullHandler())  # who shows the log is up to the application
