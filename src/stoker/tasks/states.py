"""States of recurrent models for callers (SPEC K5, D8): made of a prompt, uploaded, kept, and begun from.

Owns what an id, a path or bytes mean and which model may begin from them. Files are `models.states.store`'s,
their format `models.states.file`'s; whether names and shapes fit the model is the engine's to check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import msgspec

from stoker.client.requests.group import KnownAs
from stoker.errors import InvalidRequestError, StateNotFoundError, UnsupportedError
from stoker.ipc.model import ModelClass, ModelInfo
from stoker.ipc.request import GenerateRequest, StateOutput
from stoker.ipc.status import CallKind
from stoker.ipc.usage import Tensor, Usage
from stoker.models.states.file import MAX_STATE_BYTES, check_state, dump_state
from stoker.models.states.store import SavedState, StateStore, check_name
from stoker.tasks.fields import CallKeywords, GivenState, Prompt, RequestKeywords, request_of
from stoker.tasks.tensor_call import TaskRuntime, answers_of

__all__ = ["GivenState", "SavedState", "StateEmbedding", "StateKeywords", "States"]

_STATE_SUFFIX = ".state"
_STATELESS = {
    ModelClass.ENCODER: "it goes over a text as a whole and leaves no state; it gives vectors"
    " without this kind",
    ModelClass.ENCODER_DECODER: "what its encoder makes of a text is for its decoder to read, no state"
    " of the text",
}


class StateKeywords(CallKeywords, total=False):
    """Those of a call, and what it begins from; `owner` is the one of its states too."""

    state: GivenState | None


class StateEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """What a model made of a prompt, little-endian float32, row-major.

    Of a recurrent model the state of every layer, `shape` beginning with the number of layers; of another
    its last hidden state, `shape` being its width alone.
    """

    model: str
    shape: tuple[int, ...]
    data: bytes
    usage: Usage


class States:
    """See the module.

    `owner` sets callers apart: each sees its own states only. The empty one stands for all.

    Args:
        folder: where saved states lie; need not exist.
        runtime: whose models make them.
    """

    def __init__(self, folder: Path, runtime: TaskRuntime) -> None:
        self._folder = folder
        self._runtime = runtime
        self._store = StateStore(folder)

    def __repr__(self) -> str:
        return f"<States in {self._folder}>"

    async def save(
        self,
        prompt: Prompt | GenerateRequest,
        *,
        name: str | None = None,
        replace: bool = False,
        **fields: Unpack[StateKeywords],
    ) -> SavedState:
        """Let a recurrent model read a prompt and keep its state.

        Args:
            prompt: text, token ids or a whole request; `state` among its fields begins from another state.
            name: what to call it; None: it gets a name.
            replace: a state of that name is replaced; else that is an error.
            fields: of `GenerateRequest` and `KnownAs`, by name, and `state`; for `owner` see the class.

        Raises:
            UnsupportedError: the model has no recurrent state.
            InvalidRequestError: the name is no good or taken, or the request is.
            RequestCancelledError: the call was cancelled by its id.
            StokerError: the request failed.
        """
        if name is not None:
            check_name(name)
        given: dict[str, Any] = {**fields}
        known_as = KnownAs.taken_from(given)
        owner = known_as.owner
        request = await self.request(prompt, owner=owner, **given)
        info = self.recurrent(request.model)
        wanted = [_delivering(request, StateOutput.SAVE)]
        ((ready, _),) = await answers_of(self._runtime, CallKind.STATE, wanted, known_as)
        data = dump_state(ready.tensors, {})
        return await asyncio.to_thread(
            self._store.save,
            data,
            model=info.id,
            num_tokens=ready.num_tokens,
            name=name,
            owner=owner,
            replace=replace,
        )

    async def embed(
        self, prompt: Prompt | GenerateRequest, **fields: Unpack[StateKeywords]
    ) -> StateEmbedding:
        """The recurrent state after a prompt, or the last hidden state where a model has none (SPEC D8).

        Arguments and errors are those of `save`, but any decoder will do.
        """
        (embedding,) = await self.embed_all([prompt], **fields)
        return embedding

    async def embed_all(
        self, prompts: Sequence[Prompt | GenerateRequest], **fields: Unpack[StateKeywords]
    ) -> Sequence[StateEmbedding]:
        """The same of several prompts, as one call with one id; `timeout_s` is for all together."""
        given: dict[str, Any] = {**fields}
        known_as = KnownAs.taken_from(given)
        state = given.pop("state", None)
        requests = [request_of(prompt, given) for prompt in prompts]
        if state is not None:
            models = {request.model for request in requests}
            read = {model: await self.given(state, model=model, owner=known_as.owner) for model in models}
            requests = [
                msgspec.structs.replace(request, initial_state=read[request.model]) for request in requests
            ]
        infos = [self._runtime.resolve(request.model) for request in requests]
        for info in infos:
            _require_state(info)
        wanted = [_delivering(request, StateOutput.EMBED) for request in requests]
        found = await answers_of(self._runtime, CallKind.STATE, wanted, known_as)
        stacked = [_stacked(ready.tensors) for ready, _ in found]
        return [
            StateEmbedding(model=info.id, shape=shape, data=data, usage=end.usage)
            for info, (shape, data), (_, end) in zip(infos, stacked, found, strict=True)
        ]

    async def put(
        self,
        state: Path | bytes,
        *,
        model: str = "default",
        name: str | None = None,
        owner: str = "",
        replace: bool = False,
    ) -> SavedState:
        """Keep a safetensors file for a recurrent model; `replace` as for `save`.

        Raises:
            UnsupportedError: the model has no recurrent state.
            InvalidRequestError: the file or the name is no good, or the name is taken.
        """
        info = self.recurrent(model)
        data = await self.given(state, model=info.id)
        return await asyncio.to_thread(
            self._store.save, data, model=info.id, name=name, owner=owner, replace=replace
        )

    async def list(self, owner: str = "") -> list[SavedState]:
        """Every saved state, the newest first."""
        return await asyncio.to_thread(self._store.list, owner)

    async def get(self, state_id: str, owner: str = "") -> SavedState:
        """One of them. Raises StateNotFoundError."""
        return await asyncio.to_thread(self._store.get, state_id, owner)

    async def content(self, state_id: str, owner: str = "") -> bytes:
        """Its safetensors file. Raises StateNotFoundError, InvalidRequestError where it is damaged."""
        return await asyncio.to_thread(self._store.load, state_id, owner)

    async def delete(self, state_id: str, owner: str = "") -> None:
        """Forget one. Raises StateNotFoundError."""
        await asyncio.to_thread(self._store.delete, state_id, owner)

    def dropped(self, name: str) -> Path:
        """The file that the owner of this machine laid into the folder of states itself.

        Raises:
            InvalidRequestError: `name` leads elsewhere or to nothing.
        """
        folder = self._folder.resolve()
        with suppress(OSError, ValueError):  # a name that no file can have
            path = (self._folder / name).resolve()
            if path.parent == folder and path.is_file():
                return path
        raise InvalidRequestError(
            f"{name[:200]!r} is no file in the folder of states; upload it as `data`", param="file"
        )

    def recurrent(self, model: str) -> ModelInfo:
        """The served model of that name, if it can begin from a state.

        Raises:
            UnsupportedError: it cannot; says what it is.
        """
        info = self._runtime.resolve(model)
        if info.model_class != ModelClass.RECURRENT:
            raise UnsupportedError(
                f"{info.id} is {info.class_text}: it has no recurrent state to begin from or to save",
                param="state",
            )
        return info

    async def request(
        self,
        prompt: Prompt | GenerateRequest,
        *,
        state: GivenState | None = None,
        owner: str = "",
        **fields: Unpack[RequestKeywords],
    ) -> GenerateRequest:
        """A request of these fields that begins from `state`. Raises what `given` raises."""
        request = request_of(prompt, fields)
        if state is None:
            return request
        initial = await self.given(state, model=request.model, owner=owner)
        return msgspec.structs.replace(request, initial_state=initial)

    async def given(self, state: GivenState, *, model: str = "default", owner: str = "") -> bytes:
        """The safetensors file that `state` means, for a request to this model.

        Raises:
            UnsupportedError: the model has no recurrent state.
            InvalidRequestError: there is no such state, it is damaged or another model's; `param` is `state`.
        """
        info = self.recurrent(model)
        return await asyncio.to_thread(self._read, state, info.id, owner)

    def _read(self, state: GivenState, model: str, owner: str) -> bytes:
        match state:
            case str():
                return self._saved(state, model, owner)
            case Path():
                data = _file_bytes(state)
            case _:
                data = bytes(state)
        check_state(data)
        return data

    def _saved(self, state_id: str, model: str, owner: str) -> bytes:
        try:
            found = self._store.get(state_id, owner)
            if found.model != model:
                raise InvalidRequestError(
                    f"the state {state_id!r} is one of {found.model}, not of {model}", param="state"
                )
            return self._store.load(state_id, owner)
        except StateNotFoundError as error:
            raise InvalidRequestError(error.message, param="state") from None


def _delivering(request: GenerateRequest, output: StateOutput) -> GenerateRequest:
    return msgspec.structs.replace(request, max_tokens=0, n=1, state_output=output)


def _require_state(info: ModelInfo) -> None:
    """Raises UnsupportedError where a prompt leaves nothing behind that could be embedded by."""
    if info.model_class in _STATELESS:
        raise UnsupportedError(
            f"{info.id} is {info.class_text}: {_STATELESS[ModelClass(info.model_class)]}", param="kind"
        )


def _stacked(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], bytes]:
    """One array of a state: the matrices of all layers, or the one tensor there is.

    What a layer keeps of its last inputs says little of the prompt, and has another shape.
    """
    layers = [tensor for tensor in tensors if tensor.name.endswith(_STATE_SUFFIX)]
    if not layers:
        assert len(tensors) == 1, f"{len(tensors)} tensors of which none is a state"
        return tensors[0].shape, tensors[0].data
    assert len({tensor.shape for tensor in layers}) == 1, "layers of several shapes"
    return (len(layers), *layers[0].shape), b"".join(tensor.data for tensor in layers)


def _file_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise InvalidRequestError(f"there is no state file {path}", param="state")
        with path.open("rb") as file:
            return file.read(MAX_STATE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot read the state file {path}: {error.strerror}", param="state"
        ) from None
