"""A runtime without an engine whose one model reads pictures: its answers are a script."""

from __future__ import annotations

import msgspec

from encoding_runtime import ENCODER_INFO
from grouping import OpensGroups
from planning import planned_chat
from stoker.images.intake import Intake
from stoker.images.limits import ImageLimits
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, Usage
from stoker.models.chat_templates import CHATML
from stoker.settings import EngineSettings

READER_INFO = msgspec.structs.replace(
    ENCODER_INFO, id="reader", model_class="decoder", has_vision=True, chat_template=CHATML
)


class ReadingRuntime(OpensGroups):
    """What reading and its command take of a runtime.

    Attributes:
        answers: texts in order, the last one again and again; one that ends in "..." is cut off.
        requests: what was asked.
    """

    def __init__(self, *answers, edge_px=100, reason=FinishReason.STOP):
        self.answers = list(answers)
        self.reason = reason
        self.requests = []
        self.images = Intake(ImageLimits(edge_px=edge_px))
        self.settings = EngineSettings()
        self.info = READER_INFO
        self.is_closed = False

    def __call__(self, settings):
        """The factory that hands itself out."""
        self.settings = settings
        return self

    async def start(self):
        """Nothing to start."""

    async def close(self):
        """Note it."""
        self.is_closed = True
        self.images.close()

    def resolve(self, model):
        """The one model."""
        return self.info

    async def prepare_chat(self, messages, *, model="default"):
        """As the runtime prepares."""
        return planned_chat(self.info, messages)

    async def stream(self, request):
        """The next answer, in two pieces."""
        self.requests.append(request)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        is_cut = text.endswith("...")
        text = text.removesuffix("...")
        reason = FinishReason.LENGTH if is_cut else self.reason
        yield Delta(request_id="x", index=0, text=text[:3], token_ids=[1])
        yield Delta(request_id="x", index=0, text=text[3:], token_ids=[2], finish_reason=reason)
        yield Finished(request_id="x", usage=Usage(), timings=Timings())
