"""Stoker: one process owns a machine's accelerator and memory, and shares them between its users."""

import logging

from stoker import sync
from stoker.errors import StokerError
from stoker.images import Image
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, Sampling
from stoker.ipc.usage import Timings, TokenLogprob, Usage
from stoker.runtime import Runtime, RuntimeStatus, TextDelta
from stoker.settings import EngineSettings
from stoker.tasks.ask import Answer
from stoker.tasks.read_images import Reading

__all__ = [
    "Answer",
    "EngineSettings",
    "FinishReason",
    "GenerateRequest",
    "Image",
    "ModelInfo",
    "Priority",
    "Reading",
    "Runtime",
    "RuntimeStatus",
    "Sampling",
    "StokerError",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "Usage",
    "sync",
]

logging.getLogger("stoker").addHandler(logging.NullHandler())  # who shows the log is up to the application
