"""States of recurrent models at a server: the methods of `stoker.tasks.states.States` over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from stoker.errors import UnsupportedError
from stoker.ipc.request import GenerateRequest
from stoker.ipc.usage import Usage
from stoker.models.states.store import SavedState
from stoker.remote.bodies import call_body, refuse, request_headers, state_fields, state_path
from stoker.remote.connection import ServerConnection
from stoker.remote.wire import STATES
from stoker.tasks.fields import Prompt
from stoker.tasks.states import StateEmbedding, StateKeywords


class RemoteStates:
    """See the module. Each API key has states of its own; `owner` is the server's to know.

    Args:
        server: that keeps them.
    """

    def __init__(self, server: ServerConnection) -> None:
        self._server = server

    def __repr__(self) -> str:
        return f"<RemoteStates at {self._server.url}>"

    async def save(
        self,
        prompt: Prompt | GenerateRequest,
        *,
        name: str | None = None,
        replace: bool = False,
        **fields: Unpack[StateKeywords],
    ) -> SavedState:
        """As `States.save`."""
        text, body = await _body_of(prompt, fields)
        asked = {"prompt": text, "name": name, "replace": replace, **body}
        found = await self._server.post(STATES, asked, headers=request_headers(fields))
        return self._server.converted(found, SavedState)

    async def embed(
        self, prompt: Prompt | GenerateRequest, **fields: Unpack[StateKeywords]
    ) -> StateEmbedding:
        """As `States.embed`."""
        text, body = await _body_of(prompt, fields)
        asked = {"input": text, "encoding_format": "base64", **body}
        found = await self._server.post(f"{STATES}/embeddings", asked, headers=request_headers(fields))
        return StateEmbedding(
            model=found["model"],
            shape=tuple(found["shape"]),
            data=base64.b64decode(found["data"]),
            usage=Usage(prompt_tokens=found["usage"]["prompt_tokens"]),
        )

    async def embed_all(
        self, prompts: Sequence[Prompt | GenerateRequest], **fields: Unpack[StateKeywords]
    ) -> Sequence[StateEmbedding]:
        """As `States.embed_all`, one prompt after the other."""
        return [await self.embed(prompt, **fields) for prompt in prompts]

    async def put(
        self,
        state: Path | bytes,
        *,
        model: str = "default",
        name: str | None = None,
        owner: str = "",
        replace: bool = False,
    ) -> SavedState:
        """As `States.put`."""
        refuse({"owner": owner})
        data = (await asyncio.to_thread(state_fields, state))["state"]
        body = {"model": model, "name": name, "replace": replace, **data}
        return self._server.converted(await self._server.post(STATES, body), SavedState)

    async def list(self, owner: str = "") -> list[SavedState]:
        """As `States.list`."""
        refuse({"owner": owner})
        found = await self._server.get(STATES, dict[str, Any])
        return [self._server.converted(entry, SavedState) for entry in found["data"]]

    async def get(self, state_id: str, owner: str = "") -> SavedState:
        """As `States.get`."""
        refuse({"owner": owner})
        return await self._server.get(state_path(state_id), SavedState)

    async def content(self, state_id: str, owner: str = "") -> bytes:
        """As `States.content`."""
        refuse({"owner": owner})
        return await self._server.content(f"{state_path(state_id)}/content")

    async def delete(self, state_id: str, owner: str = "") -> None:
        """As `States.delete`."""
        refuse({"owner": owner})
        await self._server.delete(state_path(state_id))


async def _body_of(prompt: Prompt | GenerateRequest, fields: StateKeywords) -> tuple[Any, dict[str, Any]]:
    """The prompt, and the fields beside it.

    Raises:
        UnsupportedError: a whole request is given, or a field does not travel.
    """
    if isinstance(prompt, GenerateRequest):
        raise UnsupportedError(
            "a whole request does not travel with a state: give its prompt", param="prompt"
        )
    given: dict[str, Any] = {**fields}
    state = given.pop("state", None)
    body = call_body(given) | await asyncio.to_thread(state_fields, state)
    return prompt if isinstance(prompt, str) else list(prompt), body
