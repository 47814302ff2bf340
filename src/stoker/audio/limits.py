"""What the recordings of a request may cost, and what one was (SPEC V9).

Values only. `decode` holds to them and imports numpy, which is loaded with the first recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """Bounds of the recordings of one request.

    Attributes:
        max_bytes: of one encoded recording.
        max_s: seconds of all together.
        max_recordings: how many.
        used_s: seconds of those that came before.
    """

    max_bytes: int = 25 * 2**20
    max_s: int = 600
    max_recordings: int = 16
    used_s: float = 0.0

    @classmethod
    def of(cls, settings: EngineSettings) -> AudioLimits:
        """As the settings say."""
        return cls(max_bytes=settings.max_audio_bytes, max_s=settings.max_audio_seconds)


DEFAULT_LIMITS = AudioLimits()


@dataclass(frozen=True, slots=True)
class AudioReport:
    """What a recording was.

    Attributes:
        duration_s: seconds of it.
        rate_hz: samples a second, as it was given.
        num_channels: as it was given; their mean is heard.
        format: by its content, such as WAV.
    """

    duration_s: float
    rate_hz: int
    num_channels: int
    format: str
