"""What the loaded model and the settings allow a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.ipc.model import CacheMode, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of one model's scheduler.

    Attributes:
        num_slots: sequences that run at once.
        num_sequences: sequences the backend knows; those beyond the slots are spare.
        num_cells: tokens that all sequences may hold together.
        n_batch: tokens a step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step.
        cell_bytes: what a token takes in a snapshot, about.
        state_bytes: what a snapshot takes besides; both 0: the backend exports no state.
        park_bytes: what snapshots of waiting sequences may take together.
        cache_mode: what is kept of sequences that have ended.
        model, source: fingerprint of the model, and the path of its file.
    """

    num_slots: int
    num_sequences: int = 0
    num_cells: int
    n_batch: int
    max_queue: int = 512
    max_prompt_rows: int = 64
    can_trim: bool = True
    can_fork: bool = True
    cell_bytes: int = 0
    state_bytes: int = 0
    park_bytes: int = 0
    policy: Policy = Policy.LATENCY
    target_step_s: float = 0.05
    background_patience_s: float = 30.0
    cache_mode: CacheMode = CacheMode.BOTH
    model: str = ""
    source: str = ""

    @property
    def can_export(self) -> bool:
        """Whether a sequence's state can be had as bytes."""
        return self.cell_bytes > 0 or self.state_bytes > 0

    @property
    def can_share_cells(self) -> bool:
        """Whether sequences of several requests share cells."""
        return self.can_fork and self.cache_mode.keeps_cells

    def snapshot_bytes(self, num_tokens: int) -> int:
        """What the state of so many tokens takes, about."""
        return self.state_bytes + self.cell_bytes * num_tokens
