"""A runtime whose engine is other machines, and the models that it serves: those of all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.client.models.specs import FoundModel, ModelSource
from stoker.errors import InvalidRequestError, MachineSetupError, ModelNotFoundError
from stoker.gate.engine import PeersEngine
from stoker.gate.http_peer import HttpPeer
from stoker.gate.site import Site
from stoker.ipc.model import CLIENT_SIDE, ModelInfo, ModelSpec, Reach
from stoker.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.gate.link import PeerLink
    from stoker.settings import EngineSettings

log = logging.getLogger(__name__)

EMBEDDED = ""
"""In a file of keys: the key of every machine that has none of its own."""


def links_of(settings: EngineSettings) -> list[PeerLink]:
    """The machines of the settings, with their keys.

    Raises:
        InvalidRequestError: there are none, two are one, or a URL or a key is none.
        MachineSetupError: the file of keys cannot be read.
    """
    if not settings.peers:
        text = "peers: name a machine at least: --peer http://HOST:8686, or peers = [...] in the file"
        raise InvalidRequestError(text, param="peers")
    keys = _keys_of(settings.peer_key_file)
    links: dict[str, PeerLink] = {}
    for url in settings.peers:
        try:
            link = HttpPeer(url, keys.get(url.rstrip("/"), keys.get(EMBEDDED)))
        except InvalidRequestError as error:
            at = "peer_key_file" if error.param == "api_key" else "peers"
            raise InvalidRequestError(f"{at}: {error.message}", param=at) from None
        if link.name in links:
            raise InvalidRequestError(f"peers: {link.name} is named twice", param="peers")
        links[link.name] = link
    if strange := sorted(keys.keys() - {EMBEDDED} - {url.rstrip("/") for url in settings.peers}):
        log.warning("the file of the machines' keys has a key for %s, which is no peer", strange[0])
    return list(links.values())


def _keys_of(path: Path | None) -> dict[str, str]:
    """Keys by URL; a line without a URL is for all others."""
    if path is None:
        return {}
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineSetupError(
            f"cannot read the file of the machines' keys {path}: {reason}", param="peer_key_file"
        ) from None
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            url, _, key = line.rpartition(" ")
            found[url.strip().rstrip("/")] = key
    return found


class SiteSource(ModelSource):
    """The models of the machines, as settings lead to those of one's own.

    Args:
        settings: the gate's.
        site: the machines.
    """

    def __init__(self, settings: EngineSettings, site: Site) -> None:
        super().__init__(settings, found_of(site.infos()))
        self._site = site

    def find(self, name: str, reach: Reach = Reach.LOCAL) -> FoundModel:  # noqa: ARG002 - a machine's own matter
        """A model of the site. Raises ModelNotFoundError: no machine serves it."""
        for found in found_of(self._site.infos()):
            if found.spec.id == name:
                return found
        text = f"no machine of this site serves {name!r}: load it at one of them, and it is served here too"
        raise ModelNotFoundError(text, param="model")


def found_of(infos: Sequence[ModelInfo]) -> list[FoundModel]:
    """Models of machines as a client serves them: none is loaded at its start."""
    return [FoundModel(_spec(info), info, is_due=False) for info in infos]


def _spec(info: ModelInfo) -> ModelSpec:
    own = {name: getattr(info, name) for name in CLIENT_SIDE}
    return ModelSpec(id=info.id, path=info.path, **own)


class GateRuntime(Runtime):
    """As `Runtime`, with other machines for an engine; for `stoker gate`.

    Args:
        settings: `peers` and what else is named so; what is of an engine of one's own changes nothing.
        links: to the machines, where they are not those of the settings.

    Raises:
        InvalidRequestError, MachineSetupError: as `links_of`.
    """

    def __init__(self, settings: EngineSettings, links: Sequence[PeerLink] | None = None) -> None:
        super().__init__(settings=settings)
        self._site = Site(links_of(settings) if links is None else links)
        self._client.new_transport = lambda settings: PeersEngine(self._site, settings)
        self._client.read_source = self._read_source
        self._client.waits_for = self._site.why_down
        self._site.on_models = self._models_changed
        self.take_settings = self._take_settings

    def __repr__(self) -> str:
        return f"<GateRuntime {self._site!r}>"

    async def close(self) -> None:
        """As `Runtime.close`; machines go on with what is not of this gate."""
        await super().close()
        await self._site.close()

    def replace_machines(self, links: Sequence[PeerLink]) -> None:
        """Have these machines from now on; one that is left out ends what it has, and its link is closed."""
        self._site.replace(links)

    async def _read_source(self, settings: EngineSettings) -> ModelSource:
        self._site.start()
        await self._site.until_up()
        return SiteSource(settings, self._site)

    async def _take_settings(
        self, settings: EngineSettings, before: Callable[[], None] = lambda: None
    ) -> None:
        """Have the machines of these settings in place of those of the last; no request is lost."""
        links = links_of(settings)
        before()
        self._site.replace(links)

    def _models_changed(self) -> None:
        """A machine has other models than it had."""
        if (supervisor := self._client.supervisor) is not None and supervisor.is_taking:
            supervisor.takeover.take(found_of(self._site.infos()))
