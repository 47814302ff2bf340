"""From what a caller calls a model to one that is in memory: found, downloaded, read, loaded.

Owns which names may be loaded into a running engine and how downloads show among the models. The loads
themselves are `stoker.client.models.loading`', files `stoker.models`'.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker.client.models.specs import ServedSpecs, served
from stoker.errors import ModelNotFoundError, OperatorOnlyError
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelClass, ModelLife, Reach
from stoker.ipc.status import ModelStatus
from stoker.models.hub.downloads import Downloads
from stoker.models.hub.reference import is_reference
from stoker.models.seq2seq import check_one_slot
from stoker.models.store import ModelStore, is_fake

if TYPE_CHECKING:
    from stoker.client.supervisor import EngineSupervisor
    from stoker.client.watcher import Watcher
    from stoker.ipc.model import ModelInfo, ModelSpec
    from stoker.machine.tiers import TierDefaults
    from stoker.settings import EngineSettings


class SpecChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants differently of a model than the settings say; None: as it is."""

    keep_alive_s: float | None = None
    n_ctx: int | None = None
    num_slots: int | None = None

    def check(self, info: ModelInfo) -> None:
        """Raises UnsupportedError where a model of that class cannot be had so."""
        if info.model_class == ModelClass.ENCODER_DECODER:
            check_one_slot(info.id, self.num_slots or 1)

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """The spec with these changes."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if self.n_ctx is not None:
            given["num_cells"] = 0  # what is asked for is what all its slots share
        return msgspec.structs.replace(spec, **given)


class ModelLookup:
    """The models that can be had, and those on their way.

    Args:
        settings: the engine's.
        defaults: of the machine's tier.
        host: loads them.
        watcher: is told of downloads.
    """

    def __init__(
        self, settings: EngineSettings, defaults: TierDefaults, supervisor: EngineSupervisor, watcher: Watcher
    ) -> None:
        self._settings = settings
        self._defaults = defaults
        self._supervisor = supervisor
        self._watcher = watcher
        self._store = ModelStore(settings.models_dir)
        self._downloads = Downloads(settings.models_dir, self._download_moved)
        self._coming: dict[str, ModelState] = {}

    def __repr__(self) -> str:
        return f"<ModelLookup {self._store!r} {self._downloads!r}>"

    async def load(self, ref: str, changes: SpecChanges, reach: Reach) -> ModelInfo:
        """Have a model in memory, served from then on.

        Args:
            ref: id of a served model, a name that `stoker models` lists, a file below the models folder, or
                OWNER/REPO[:FILE] of the hub, which is downloaded first.
            changes: what it is to be loaded with; a model that is loaded otherwise is replaced.
            reach: what `ref` may lead to.

        Raises:
            ModelNotFoundError: there is no such model, or it lies outside the models folder.
            OperatorOnlyError: it would have to be downloaded, which this caller may not ask for.
            UnsupportedError: a model of that class cannot be had so.
            NotReadyError: no engine is there, or the load or download was stopped.
            StokerError: why it cannot be loaded or downloaded.
        """
        self._supervisor.check_open()
        spec = self._supervisor.registry.spec(ref)
        if spec is not None:
            info = self._supervisor.registry.info(ref)
            changes.check(info)
            return await self._supervisor.loads.load(changes.applied(spec), info)
        found = await self._find(ref, reach)
        changes.check(found.info)
        known = self._supervisor.registry.spec(found.spec.id)
        base = known if known is not None and known.path == found.spec.path else found.spec
        return await self._supervisor.loads.load(changes.applied(base), found.info)

    async def unload(self, ref: str) -> None:
        """Have a model out of memory, or stop its load or download.

        Raises:
            ModelNotFoundError: it is not served.
        """
        if ref in self._downloads:
            self._downloads.stop(ref)
        else:
            await self._supervisor.loads.unload(ref)

    def statuses(self) -> list[ModelStatus]:
        """Every served model, and every download."""
        coming = [
            ModelStatus(id=model, state=moved.state, stage=moved.stage, fraction=moved.fraction)
            for model, moved in self._coming.items()
        ]
        return [*self._supervisor.statuses(), *coming]

    def close(self) -> None:
        """Stop every download."""
        self._downloads.close()

    async def _find(self, ref: str, reach: Reach) -> ServedSpecs:
        find = self._store.resolve_fake if reach is Reach.ANY and is_fake(ref) else self._store.resolve_listed
        try:
            file = await asyncio.to_thread(find, ref)
        except ModelNotFoundError:
            if not is_reference(ref):
                raise
            if reach is Reach.LOCAL:
                raise _downloads_off(ref) from None
            path = await self._download(ref)
            file = await asyncio.to_thread(self._store.resolve_listed, str(path))
        return served(file, self._settings, self._defaults)

    async def _download(self, ref: str) -> str:
        self._download_moved(ref, "", 0.0)
        try:
            path = await self._downloads.get(ref)
        finally:
            if ref not in self._downloads and self._coming.pop(ref, None) is not None:
                self._watcher.model_moved(ModelState(model=ref, state=ModelLife.ABSENT))
        return str(path)

    def _download_moved(self, ref: str, name: str, fraction: float) -> None:
        moved = ModelState(model=ref, state=ModelLife.DOWNLOADING, stage=name, fraction=fraction)
        self._coming[ref] = moved
        self._watcher.model_moved(moved)


def _downloads_off(ref: str) -> OperatorOnlyError:
    return OperatorOnlyError(
        f"{ref} is not on this machine, and the server downloads it for operators with a key only: run"
        f" `stoker pull {ref}` there, or start the server with --allow-downloads or --admin-key-file",
        param="model",
    )
