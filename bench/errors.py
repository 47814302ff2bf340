"""What can go wrong in a benchmark run, as one class with a sentence that says what to do."""

from __future__ import annotations


class BenchError(Exception):
    """A server did not start, did not answer as asked, or a peer could not be installed."""
