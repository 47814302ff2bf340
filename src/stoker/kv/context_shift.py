"""Going on where the context is full: the oldest tokens after the first hundred are dropped (SPEC C12).

About half of what follows the first hundred goes at once, and what stays is computed anew: then the text that
follows is what the model would have written after the tokens that stay, on any model, after a crash too.
"""

from __future__ import annotations

from stoker.kv.sequence import Sequence

NUM_KEPT = 100
"""Tokens at the start that are never dropped; a quarter of the context where that is less."""


def num_kept(n_ctx: int) -> int:
    """Tokens at the start that stay."""
    return min(NUM_KEPT, n_ctx // 4)


def num_dropped(length: int, n_ctx: int) -> int:
    """Tokens to drop of `length`; 0 while they leave room for one more."""
    if length < n_ctx:
        return 0
    kept = num_kept(n_ctx)
    return length - kept - (n_ctx - kept) // 2


def shifted(tokens: list[int], n_ctx: int) -> list[int]:
    """What stays of them."""
    kept = num_kept(n_ctx)
    return tokens[:kept] + tokens[kept + num_dropped(len(tokens), n_ctx) :]


def replayed(prompt: list[int], generated: list[int], n_ctx: int) -> list[int]:
    """What a sequence holds after `generated`, when each of them shifted the context as it got full."""
    tokens = shifted(prompt, n_ctx) if len(prompt) >= n_ctx else list(prompt)
    for token in generated:
        tokens.append(token)
        if len(tokens) >= n_ctx:
            tokens = shifted(tokens, n_ctx)
    return tokens


def note_dropped(sequence: Sequence, count: int, n_ctx: int) -> None:
    """Count anew how much of a sequence is prompt after `count` tokens behind the first ones were dropped."""
    of_prompt = max(0, min(count, sequence.num_prompt - num_kept(n_ctx)))
    sequence.num_prompt -= of_prompt
    sequence.num_forgotten += count - of_prompt
    sequence.wants_prompt_logits = False
