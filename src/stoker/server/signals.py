"""What signals do to a server: stop it, stop it at once, suspend and resume it, read its settings again."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Protocol

from stoker.errors import StokerError
from stoker.power.sleep import SleepWatch
from stoker.site_settings import PerModelSettings
from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stoker.power.sleep import Sleeper
    from stoker.settings import EngineSettings, ServerSettings

    ReadSettings = Callable[[], tuple[EngineSettings, ServerSettings]]

log = logging.getLogger(__name__)


class Stoppable(Protocol):
    """What a signal stops."""

    @property
    def num_live(self) -> int:
        """Requests and calls that have not ended."""
        ...

    def stop(self) -> None:
        """Begin the shutdown."""
        ...

    def hurry(self) -> None:
        """End what a shutdown waits for."""
        ...


class StopSwitch:
    """Stops a service at the first signal and ends what it waits for at the second.

    Args:
        service: what is stopped.

    Attributes:
        exit_status: of the program: 0, or as shells report an end by that signal where one came again.
    """

    def __init__(self, service: Stoppable) -> None:
        self._service = service
        self._is_stopping = False
        self.exit_status = 0

    def __repr__(self) -> str:
        return f"<StopSwitch stopping={self._is_stopping} exit_status={self.exit_status}>"

    def take(self, number: signal.Signals) -> None:
        """A signal came."""
        if self._is_stopping:
            log.warning("ending at once")
            self.exit_status = 128 + number
            self._service.hurry()
            return
        self._is_stopping = True
        again = "Ctrl-C" if number is signal.SIGINT else number.name
        if num_live := self._service.num_live:
            live = count_text(num_live, "request is", "requests are")
            log.warning("%s finishing; %s again ends at once", live, again)
        else:
            log.info("stopping")
        self._service.stop()


_OF_MODELS = PerModelSettings.model_fields.keys() | {
    "chat_template",
    "default_max_tokens",
    "draft_model",
    "lora",
    "mmproj",
    "model_tables",
    "models",
    "peer_key_file",
    "peers",
    "placement",
    "rerank_output",
}
_OF_KEYS = frozenset({"keys", "api_key_file", "admin_key_file"})


class ReloadSwitch:
    """Reads the settings again when told to, and takes models and keys over; errors go to the log.

    Args:
        read: the settings as they are now.
        started_with: what they were.
        takes_models: serves the models of settings; calls its second argument before anything changes.
        takes_keys: takes the keys of settings.
    """

    def __init__(
        self,
        read: ReadSettings,
        started_with: tuple[EngineSettings, ServerSettings],
        takes_models: Callable[[EngineSettings, Callable[[], None]], Coroutine[None, None, None]],
        takes_keys: Callable[[ServerSettings], None],
    ) -> None:
        self._read = read
        self._started_with = started_with
        self._takes_models = takes_models
        self._takes_keys = takes_keys
        self._lock = asyncio.Lock()
        self._acts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ReloadSwitch({len(self._acts)} under way)"

    def reload(self) -> None:
        """Begin to read the settings; a second time waits for the first."""
        act = asyncio.ensure_future(_logged("read the settings again: all stays as it was", self._reload()))
        self._acts.add(act)
        act.add_done_callback(self._acts.discard)

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        acts = list(self._acts)
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)

    async def _reload(self) -> None:
        async with self._lock:
            engine, server = await asyncio.to_thread(self._read)
            await self._takes_models(engine, lambda: self._takes_keys(server))
        if late := self._late(engine, server):
            log.warning("with the next start only: %s", ", ".join(late))
        log.info("the settings were read again")

    def _late(self, engine: EngineSettings, server: ServerSettings) -> list[str]:
        """Settings that differ from those that it was started with and are not taken over."""
        before_engine, before_server = self._started_with
        names = [name for name in type(engine).model_fields if name not in _OF_MODELS]
        late = [name for name in names if getattr(engine, name) != getattr(before_engine, name)]
        names = [name for name in type(server).model_fields if name not in _OF_KEYS]
        return late + [name for name in names if getattr(server, name) != getattr(before_server, name)]


class SleepSwitch:
    """Suspends and resumes one runtime when told to; errors go to the log.

    Args:
        runtime: what is suspended and resumed.
    """

    def __init__(self, runtime: Sleeper) -> None:
        self._runtime = runtime
        self._acts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"SleepSwitch({len(self._acts)} under way)"

    def suspend(self) -> None:
        """Begin to suspend, after the grace that the settings say."""
        self._begin("suspend", self._runtime.suspend("signal"))

    def resume(self) -> None:
        """Begin to resume."""
        self._begin("resume", self._runtime.resume())

    def follow_machine(self, bus_address: str | None = None) -> None:
        """Sleep and wake with the machine from now on, where it tells of that.

        Args:
            bus_address: of the bus that logind is on; None: the system's.
        """
        self._begin("follow the machine's sleep", SleepWatch(self._runtime, bus_address).run())

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        acts = list(self._acts)
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)

    def _begin(self, what: str, work: Coroutine[None, None, None]) -> None:
        act = asyncio.ensure_future(_logged(what, work))
        self._acts.add(act)
        act.add_done_callback(self._acts.discard)


async def _logged(what: str, work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except StokerError as error:
        log.warning("could not %s: %s", what, error)
    except Exception:
        log.exception("could not %s", what)
