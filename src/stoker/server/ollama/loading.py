"""What a request without a prompt asks for: a model in memory, or with `"keep_alive": 0` out of it.

Apart because conversations and prompts ask for it alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.model import Reach
from stoker.server.inbound.bodies import while_connected
from stoker.server.ollama.options import kept_seconds, note_ignored

if TYPE_CHECKING:
    from starlette.requests import Request

    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext


async def loaded_or_unloaded(
    context: ServerContext, request: Request, info: ModelInfo, keep_alive: float | str | None
) -> str:
    """Load a served model, as any request for it would, or unload it.

    How long it stays from then on is for operators to say; of others `keep_alive` has no effect here.

    Returns:
        Ollama's word for what was done.

    Raises:
        OperatorOnlyError: it is to be unloaded, and the caller is no operator.
        StokerError: why it cannot be loaded.
    """
    kept_s = kept_seconds(keep_alive)
    if kept_s == 0:
        request.state.identity.require_operator()
        await while_connected(context.runtime.unload_model(info.id), request.receive)
        return "unload"
    if kept_s is not None and not request.state.identity.is_operator:
        note_ignored(request, "keep_alive")
        kept_s = None
    loading = context.runtime.load_model(info.id, keep_alive=kept_s, reach=Reach.LOCAL)
    await while_connected(loading, request.receive)
    return "load"
