"""Groups of requests for runtimes without an engine."""

from __future__ import annotations

from contextlib import contextmanager

from stoker.client.requests.group import RequestGroup
from stoker.tasks.embed import embed_texts
from stoker.tasks.read_images import MAX_TOKENS, Question, read_images
from stoker.tasks.rerank import rank_documents


class OpensGroups:
    """Opens groups as the runtime does; the requests of each go to `stream`, without their ids."""

    @contextmanager
    def group(self, kind, request, num_members, known_as):
        """A group that no table knows."""
        yield RequestGroup(kind, request, num_members, known_as, lambda member: self.stream(member.request))

    async def embed(self, inputs, **fields):
        """As the runtime embeds."""
        return await embed_texts(self, inputs, **fields)

    async def rerank(self, query, documents, **fields):
        """As the runtime ranks."""
        return await rank_documents(self, query, documents, **fields)

    async def read(self, images, *, ask=None, schema=None, max_tokens=MAX_TOKENS, **fields):
        """As the runtime reads."""
        return await read_images(self, images, Question(ask, schema, max_tokens), **fields)
