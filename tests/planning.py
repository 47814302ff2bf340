"""A chat planned within the test's own process; a runtime leaves the template to a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.chat.conversation import NO_TOOLS, ToolOffer, lay_out
from stoker.ipc.model import ModelInfo
from stoker.tasks.chat import ChatPlan, chat_job, planned


def planned_chat(
    info: ModelInfo, messages: Sequence[Mapping[str, Any]], offer: ToolOffer = NO_TOOLS
) -> ChatPlan:
    """What a runtime's `prepare_chat` gives."""
    job, images = chat_job(info, messages, offer)
    return planned(job, images, lay_out(job.conversation))
