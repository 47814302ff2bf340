"""POST /api/pull and DELETE /api/delete: models that come and go; and what of Ollama is not meant here.

Models come from the Hugging Face hub, `OWNER/REPO[:FILE|:QUANTISATION]`, and are served from then on. Both
are for operators, as the routes below /v1/runtime/models are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import ForbiddenError, ModelNotFoundError
from stoker.ipc.model import Reach
from stoker.server.context import ServerContext
from stoker.server.inbound.bodies import while_connected
from stoker.server.inbound.body import Described, read_body
from stoker.server.ollama.lines import ending, line
from stoker.server.ollama.models import OllamaModelRequest
from stoker.server.ollama.names import asked_model, own_name, resolved
from stoker.server.reply import json_response
from stoker.server.sse import LOADING_GRACE_S, EventStream

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.status import ModelStatus

    Json = dict[str, Any]

_PERIOD_S = 0.2  # between two looks at a download
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
_BEAT = line({"status": "pulling"})
_NOT_MEANT = {
    "/api/copy": "a model has one name here; serve the file under another one instead",
    "/api/create": "models are GGUF files, which are not made here; system prompts and samplers come with"
    " the request",
    "/api/push": "nothing is uploaded from here",
}


class OllamaPullRequest(OllamaModelRequest):
    """A model to get; the hub is asked as it is set up, whatever `insecure` says."""

    stream: bool | None = None
    insecure: bool | None = None


def router(context: ServerContext) -> APIRouter:
    """Models that come and go."""
    routes = APIRouter(tags=["ollama"])

    @routes.post("/api/pull", openapi_extra=Described(OllamaPullRequest))
    async def pull(request: Request) -> Response:
        """Get a model from the hub and serve it; tells how far it is, line by line unless told not to."""
        request.state.identity.require_operator()
        body = await read_body(request, OllamaPullRequest)
        context.require_ready()
        is_trusted = request.state.key_digest or context.settings.allow_downloads
        lines = _pulled(context, body.model, Reach.HUB if is_trusted else Reach.LOCAL)
        if body.stream is False:
            await while_connected(_to_its_end(lines), request.receive)
            return json_response({"status": "success"})
        keepalive_s = context.settings.keepalive_s
        return EventStream(lines, {}, keepalive_s, LOADING_GRACE_S, ending(_BEAT))

    @routes.delete("/api/delete", openapi_extra=Described(OllamaModelRequest))
    async def delete(request: Request) -> Response:
        """Unload a model and delete its file, which has to lie in the models folder."""
        request.state.identity.require_operator()
        body = await read_body(request, OllamaModelRequest)
        info = asked_model(context.runtime, request, body.model)
        folder = (await context.runtime.status()).settings["models_dir"]
        files = await asyncio.to_thread(_files_of, info, Path(folder))
        await while_connected(context.runtime.unload_model(info.id), request.receive)
        await asyncio.to_thread(_remove, files)
        return json_response({"status": "success"})

    for path, why in _NOT_MEANT.items():
        routes.add_api_route(path, _refusal(why), methods=["POST"])
    return routes


def _refusal(why: str) -> Any:
    async def refuse() -> Response:
        """Refused: it is not meant here."""
        raise HTTPException(501, why)

    return refuse


# ------------------------------------------------------------ coming


async def _pulled(context: ServerContext, name: str, reach: Reach) -> AsyncGenerator[bytes, None]:
    """Get a model and serve it, without loading it; closing it stops the download where nobody else wants it.

    Yields lines that say how far it is. Iterating raises the StokerError of why it does not come.
    """
    reference = own_name(name)
    with suppress(ModelNotFoundError):
        resolved(context.runtime, name)
        yield line({"status": "success"})
        return
    coming = asyncio.ensure_future(context.runtime.serve_model(reference, reach))
    told: Json = {}
    try:
        while not (await asyncio.wait((coming,), timeout=_PERIOD_S))[0]:
            if (now := _progress(_status_of(context, reference), told)) != told:
                told = now
                yield line(now)
        try:
            await coming
        except ModelNotFoundError as error:
            raise error if "/" in reference else _no_reference(reference) from None
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield line({"status": status})


def _no_reference(name: str) -> ModelNotFoundError:
    text = "Ollama's library is not here; models come from the Hugging Face hub, as OWNER/REPO[:QUANTISATION]"
    return ModelNotFoundError(f"model '{name}' not found: {text}", param="model")


def _status_of(context: ServerContext, reference: str) -> ModelStatus | None:
    """How far a download is; None: there is none, or none any more."""
    return next((one for one in context.runtime.model_states() if one.id == reference), None)


def _progress(download: ModelStatus | None, told: Json) -> Json:
    """Ollama's words for where it is, before and behind the download what was told; names are as digests."""
    if download is None and told:
        return told
    if download is None or not download.num_bytes:
        return {"status": "pulling manifest"}
    done = round(download.fraction * download.num_bytes)
    name = download.stage
    return {"status": f"pulling {name}", "digest": name, "total": download.num_bytes, "completed": done}


async def _to_its_end(lines: AsyncGenerator[bytes, None]) -> None:
    async for _ in lines:
        pass


# ------------------------------------------------------------ going


def _files_of(info: ModelInfo, folder: Path) -> list[Path]:
    """The files of a model, all shards of it; of one that is a folder, its files and the folder.

    Raises:
        ForbiddenError: they do not lie in the models folder.
    """
    path = Path(info.path)
    if not path.exists() or folder.resolve() not in path.resolve().parents:
        text = f"the file of {info.id} does not lie in the models folder, so it is not deleted from here"
        raise ForbiddenError(text, param="model")
    if path.is_dir():  # a file of another model may lie there, and other folders
        return [*(each for each in path.iterdir() if each.is_file() and each.suffix != ".gguf"), path]
    if (shard := _SHARD.fullmatch(path.name)) is None:
        return [path]
    pattern = re.compile(rf"{re.escape(shard[1])}-\d{{5}}-of-{shard[2]}\.gguf", re.IGNORECASE)
    return [each for each in path.parent.iterdir() if pattern.fullmatch(each.name)]


def _remove(files: list[Path]) -> None:
    for file in files:
        if file.is_dir():
            with suppress(OSError):  # something else lies there
                file.rmdir()
        else:
            file.unlink(missing_ok=True)
