"""Recordings in the client's process: read from where they are, checked, decoded, mixed and resampled."""

from stoker.audio.audio import Audio

__all__ = ["Audio"]
