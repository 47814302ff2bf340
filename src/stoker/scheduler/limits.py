"""What the loaded model and the settings allow a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.messages import Policy
from stoker.scheduler.budget import StepPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of one model's scheduler.

    Attributes:
        num_slots: sequences that run at once.
        num_sequences: sequences the backend knows; those beyond the slots are spare.
        num_cells: tokens that all sequences may hold together.
        n_batch: tokens a step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step.
        cell_bytes: what a token takes in a snapshot, about; 0: the backend exports no state.
        park_bytes: what snapshots of waiting sequences may take together.
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
    park_bytes: int = 0
    policy: Policy = Policy.LATENCY
    target_step_s: float = 0.05
    background_patience_s: float = 30.0

    @property
    def step_policy(self) -> StepPolicy:
        """The part of them that bounds a step."""
        return StepPolicy(self.n_batch, self.policy, self.target_step_s)
