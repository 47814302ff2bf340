"""POST /v1/runtime/models/load, unload and pin, /v1/runtime/suspend and resume (SPEC R3, L2, I2, I4)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.ipc.model import ModelInfo, Reach
from stoker.server.context import ServerContext
from stoker.server.inbound.bodies import while_connected
from stoker.server.inbound.body import Body, Described, Name, read_body
from stoker.server.reply import json_response
from stoker.setting_fields import MAX_LAYERS, Bytes, DeviceNames, GpuLayers, Parts
from stoker.site_settings import MAX_SLOTS
from stoker.tasks.fields import keep_alive_seconds

MAX_REASON_CHARS = 64
MAX_GRACE_S = 86_400.0


class ModelRequest(Body):
    """A model to unload, by the id it is served under."""

    model: Name


class LoadModelRequest(ModelRequest):
    """A model to load: a served one, one that `stoker models` lists, or OWNER/REPO[:FILE] of a hub.

    Attributes:
        keep_alive: seconds, or such as `10m`, that it stays after its last request; negative: for good.
        ctx_size: tokens that one request may use; of a pool of cells all its slots share them.
        slots: requests that run on it at once.
        gpu_layers, device, split_mode, tensor_split, main_gpu, cpu_moe, kv_type, kv_layout, flash_attention,
            mmap, kv_offload, expert_budget: where it lies, as the settings of the same names.
        backend: what computes it from now on; "auto": the first that reads it and works here.
        kv_bits: 4, 8 or 16: the same as kv_type q4_0, q8_0 and what the device takes by itself.
    """

    keep_alive: float | str | None = None
    ctx_size: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, validation_alias=AliasChoices("ctx_size", "ctx", "n_ctx")
    )
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] | None = Field(
        None, validation_alias=AliasChoices("slots", "num_slots")
    )
    backend: Name | None = None
    gpu_layers: GpuLayers | None = Field(None, validation_alias=AliasChoices("gpu_layers", "n_gpu_layers"))
    device: DeviceNames | None = None
    split_mode: Literal["none", "layer", "row"] | None = None
    tensor_split: Parts | None = None
    main_gpu: Annotated[int, Field(ge=0, le=255)] | None = None
    cpu_moe: Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None = None
    kv_type: Literal["f16", "bf16", "q8_0", "q4_0"] | None = None
    kv_bits: Literal[4, 8, 16] | None = None
    kv_layout: Literal["auto", "pool", "streams"] | None = None
    flash_attention: Literal["auto", "off"] | None = None
    mmap: bool | None = None
    kv_offload: bool | None = None
    expert_budget: Bytes | None = None


class PinModelRequest(ModelRequest):
    """A model to keep in memory whatever else needs room, or no longer so."""

    pinned: bool = True


class SuspendRequest(Body):
    """Why, and after how many seconds; null: what the reason and the settings say (SPEC L2)."""

    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_CHARS)] = "request"
    grace_s: Annotated[float, Field(ge=0, le=MAX_GRACE_S)] | None = None


def router(context: ServerContext) -> APIRouter:
    """Which models are in memory, and whether anything is; for operators."""
    routes = APIRouter(tags=["runtime"])
    runtime = context.runtime

    @routes.post("/v1/runtime/models/load", openapi_extra=Described(LoadModelRequest))
    async def load(request: Request) -> Response:
        """Load a model; answers when it is ready. A caller who leaves no longer wants it."""
        _require_operator(request)
        body = await read_body(request, LoadModelRequest)
        context.require_ready()
        where = body.model_dump(exclude={"model", "keep_alive", "ctx_size", "slots"}, exclude_none=True)
        loading = runtime.load_model(
            _named(context, body.model),
            keep_alive=keep_alive_seconds(body.keep_alive),
            ctx_size=body.ctx_size,
            slots=body.slots,
            reach=Reach.HUB if request.state.key_digest or context.settings.allow_downloads else Reach.LOCAL,
            **where,
        )
        return json_response(_loaded(await while_connected(loading, request.receive)))

    @routes.post("/v1/runtime/models/unload", openapi_extra=Described(ModelRequest))
    async def unload(request: Request) -> Response:
        """Free a model or stop loading it; it stays served and is loaded when a request needs it."""
        _require_operator(request)
        model = _named(context, (await read_body(request, ModelRequest)).model)
        await runtime.unload_model(model)
        return json_response({"id": model, "state": "absent"})

    @routes.post("/v1/runtime/models/pin", openapi_extra=Described(PinModelRequest))
    async def pin(request: Request) -> Response:
        """Never unload a model to make room, or with `"pinned": false` no longer so."""
        _require_operator(request)
        body = await read_body(request, PinModelRequest)
        model = _named(context, body.model)
        await (runtime.pin_model if body.pinned else runtime.unpin_model)(model)
        return json_response({"id": model, "pinned": body.pinned})

    @routes.post("/v1/runtime/suspend", openapi_extra=Described(SuspendRequest))
    async def suspend(request: Request) -> Response:
        """Save what runs and free everything; answers when that is done, or a resume came first."""
        _require_operator(request)
        body = await read_body(request, SuspendRequest)
        await runtime.suspend(body.reason, grace_s=body.grace_s)
        return json_response({"suspended": runtime.is_suspended})

    @routes.post("/v1/runtime/resume")
    async def resume(request: Request) -> Response:
        """Load what was loaded and let every request go on; answers when it serves again."""
        _require_operator(request)
        await runtime.resume()
        return json_response({"suspended": runtime.is_suspended})

    return routes


def _require_operator(request: Request) -> None:
    request.state.identity.require_operator()


def _named(context: ServerContext, model: str) -> str:
    """The id that "default" stands for; other names as they are."""
    return context.runtime.resolve(model).id if model == "default" else model


def _loaded(info: ModelInfo) -> dict[str, object]:
    return {
        "id": info.id,
        "state": "ready",
        "label": info.label,
        "backend": info.backend,
        "backend_reason": info.backend_reason or None,
        "n_ctx": info.n_ctx,
        "num_slots": info.num_slots,
        "bytes": info.memory_bytes,
        "degraded": info.degraded,
    }
