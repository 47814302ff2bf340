"""A runtime without an engine whose one model is the fake encoder or reranker; its line's bound is set."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from grouping import OpensGroups
from stoker.backends.fake.encoder import N_EMBD, vector_of
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError, ModelNotFoundError, QueueFullError
from stoker.ipc.events import Finished, Queued, StateReady
from stoker.ipc.model import ModelInfo
from stoker.ipc.usage import Tensor, Timings, Usage
from stoker.tasks.states import States

ENCODER_INFO = ModelInfo(
    id="encoder",
    path="fake:encoder=1",
    label="none",
    model_class="encoder",
    architecture="fake",
    description="stand-in",
    num_params=1,
    size_bytes=1,
    n_vocab=N_VOCAB,
    n_ctx=512,
    n_ctx_train=512,
    n_batch=64,
    num_slots=4,
    num_threads=1,
    kv_type="none",
    flash_attention="off",
    memory_bytes={"weights": 1},
    pooling="mean",
    n_embd=N_EMBD,
)


RERANKER_INFO = msgspec.structs.replace(ENCODER_INFO, id="reranker", pooling="rank")


def score_of(query, document):
    """What the fake reranker gives."""
    return float(vector_of(FakeVocabulary().pair(query, document))[0])


class EncodingRuntime(OpensGroups):
    """What embedding takes of a runtime.

    Attributes:
        requests: those that were taken.
        max_live: as many may be live at once; more are refused.
        most_live: the most that were.
        vector: what every text gets instead of its own.
        bad_text: a text that is refused.
        before: called with each request.
    """

    def __init__(self):
        self.is_ready = False
        self._closed = asyncio.Event()
        self.info = ENCODER_INFO
        self.states = States(Path("no-such-folder"), self)
        self.requests = []
        self.max_live = 10_000
        self.most_live = self.num_live = 0
        self.vector = None
        self.bad_text = None
        self.tensor_name = "embedding"
        self.before = lambda: None

    @staticmethod
    def owner_of(request_id):
        """Nobody's."""
        return ""

    @staticmethod
    def tokens(text):
        """The tokens of a text, as the engine makes them."""
        return FakeVocabulary().tokenize(text, add_special=True, parse_special=True)

    async def start(self):
        """Ready at once."""
        self.is_ready = True

    async def close(self):
        """Nothing runs."""
        self.is_ready = False
        self._closed.set()

    async def ended(self):
        """It never ends by itself."""
        await asyncio.Event().wait()

    async def events(self, *, after="", kinds=()):
        """Nothing happens until it is closed."""
        await self._closed.wait()
        return
        yield  # what makes it a stream

    @property
    def models(self):
        """The one model."""
        return [self.info]

    def resolve(self, model):
        """The one model."""
        if model in {None, "default", self.info.id}:
            return self.info
        raise ModelNotFoundError(f"no model {model!r} is served", param="model")

    async def stream(self, request, request_id=None):
        """A place in the line, a while, and the vector."""
        self.before()
        if self.num_live >= self.max_live:
            raise QueueFullError("full", retry_after_s=1.0)
        self.requests.append(request)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            yield Queued("x", 0)
            await asyncio.sleep(0)
            if request.prompt == self.bad_text:
                raise InvalidRequestError("a bad text", param="input")
            prompt = request.prompt
            if request.document is not None:
                tokens = FakeVocabulary().pair(prompt, request.document)
            else:
                tokens = self.tokens(prompt) if isinstance(prompt, str) else list(prompt)
            data = self.vector or vector_of(tokens).astype("<f4").tobytes()
            tensor = Tensor(self.tensor_name, (N_EMBD,), data)
            yield StateReady(request_id="x", num_tokens=len(tokens), tensors=[tensor])
        finally:
            self.num_live -= 1
        yield Finished(request_id="x", usage=Usage(prompt_tokens=len(tokens)), timings=Timings())
