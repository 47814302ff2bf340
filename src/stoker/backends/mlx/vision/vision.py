"""A folder's tower behind the protocol of vision: layouts, and encodes in slices between steps."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

from stoker.backends.mlx.native import enter_thread
from stoker.backends.mlx.step import failure
from stoker.backends.mlx.vision.families import Sight, projector_bytes, sight_of
from stoker.backends.mlx.vision.library import installed_version
from stoker.backends.mlx.vision.tower import Tower, open_tower
from stoker.backends.mlx.vision.views import PREPROCESSOR, PROCESSOR
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.model import Pairing
from stoker.ipc.request import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from stoker.backends.mlx.text.vocabulary import FolderVocabulary
    from stoker.backends.mlx.vision.views import Views
    from stoker.backends.protocol.backend import Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.request import Medium
    from stoker.models.folders.folder import ModelFolder

log = logging.getLogger(__name__)

_MAX_REASON_CHARS = 300


class MlxEncoding:
    """One picture on its way to embeddings; a slice ends with the layer that it is at.

    Args:
        cut: cuts it, on a thread of `pool`: that is no work of the device, and holds up no step.
        encode: begins with the squares; what it makes stops after each layer.
        pool: of one thread.
    """

    def __init__(
        self,
        cut: Callable[[], list[Image]],
        encode: Callable[[list[Image]], Generator[None, None, Rows]],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._cut = pool.submit(cut)
        self._encode = encode
        self._layers: Generator[None, None, Rows] | None = None
        self._rows: Rows | None = None
        self.is_over = False

    def __repr__(self) -> str:
        state = "over" if self.is_over else "under way" if self._layers else "being cut"
        return f"<MlxEncoding {state}>"

    def run(self, budget_s: float) -> bool:
        """Compute for about so long; whether it is done. Raises StepFailedError."""
        assert budget_s > 0, "a slice without time"
        assert not self.is_over, "a slice after the end"
        enter_thread()
        until_s = time.monotonic() + budget_s
        try:
            if self._layers is None:
                if not wait([self._cut], min(budget_s, TIMEOUT_MAX)).done:
                    return False
                self._layers = self._encode(self._cut.result())
            next(self._layers)
            while time.monotonic() < until_s:
                next(self._layers)
        except StopIteration as end:
            self._rows, self.is_over = end.value, True
        except Exception as error:
            self.is_over = True
            raise _failed(error) from error
        return self.is_over

    def result(self) -> Rows:
        """float32 (num_tokens, n_embd), once it is done."""
        assert self._rows is not None, f"{self!r} has no result"
        return self._rows

    def cancel(self) -> None:
        """Give up what was computed of it; idempotent. What is cut meanwhile is not waited for."""
        self._cut.cancel()
        if self._layers is not None:
            self._layers.close()
        self._rows, self.is_over = None, True


def _failed(error: Exception) -> StepFailedError:
    found = failure(error)
    return type(found)(f"a picture could not be encoded: {error}")


class MlxVision:
    """A tower beside the network whose embeddings it makes.

    `layout` may be called on any thread; everything else on the one that drives the model.

    Attributes:
        fingerprint: hexadecimal; differs between towers that encode a picture differently.
        weight_bytes: of the tower.
        size_bytes: of the tower, with what it computes in.
    """

    def __init__(self, folder: ModelFolder, vocabulary: FolderVocabulary, views: Views, tower: Tower) -> None:
        self.fingerprint = _fingerprint(folder)
        self.weight_bytes = tower.weight_bytes
        self.size_bytes = max(projector_bytes(folder), tower.weight_bytes)
        self._name = folder.path.name
        self._views = views
        self._tokenize = partial(vocabulary.tokenize, add_special=False, parse_special=True)
        self._tower = tower
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cut")
        self._encoding: MlxEncoding | None = None

    def __repr__(self) -> str:
        return f"<MlxVision {self._name} {self._encoding or 'idle'}>"

    def layout(self, medium: Medium) -> Layout:
        """What stands for a picture; encodes nothing. Raises UnsupportedError for recordings."""
        picture = self._picture(medium)
        return self._views.layout(picture.width, picture.height, self._tokenize)

    def begin(self, medium: Medium) -> MlxEncoding:
        """Encode a picture in slices, one at a time: not before the one before is done or cancelled."""
        former, picture = self._encoding, self._picture(medium)
        assert former is None or former.is_over, f"{former!r} is not over"
        self._encoding = MlxEncoding(lambda: self._views.cut(picture), self._encode, self._pool)
        return self._encoding

    def _encode(self, squares: list[Image]) -> Generator[None, None, Rows]:
        return self._tower.encode(map(self._views.colours.of, squares))

    def close(self) -> None:
        """Give up what is being encoded; idempotent."""
        if self._encoding is not None:
            self._encoding.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _picture(self, medium: Medium) -> Picture:
        if not isinstance(medium, Picture):
            raise UnsupportedError(f"{self._name} sees, and takes no recordings", param="messages")
        return medium


def open_vision(folder: ModelFolder, vocabulary: FolderVocabulary) -> tuple[MlxVision | None, Sight]:
    """Load what a folder sees with; where that fails, the model is served for text alone."""
    sight = sight_of(folder)
    if sight.pairing is not Pairing.READY or sight.views is None:
        return None, sight
    try:
        return MlxVision(folder, vocabulary, sight.views, open_tower(folder)), sight
    except Exception as error:  # noqa: BLE001 - whatever mlx-vlm's classes make of weights that do not fit
        text = str(error)[:_MAX_REASON_CHARS]
        reason = f"mlx-vlm {installed_version()} does not load its tower: {type(error).__name__}: {text}"
        log.warning("%s is served for text alone: %s", folder.path.name, reason)
        return None, Sight(Pairing.BROKEN, reason)


def _fingerprint(folder: ModelFolder) -> str:
    parts = [folder.fingerprint.encode(), installed_version().encode()]
    paths = (folder.path / name for name in (PREPROCESSOR, PROCESSOR))
    parts += [path.read_bytes() for path in paths if path.exists()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
